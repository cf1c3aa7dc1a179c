"""Does any example see another? Looked for by running a few examples in known patterns and comparing rows.

Forward, no row may move when its neighbours change; backward, the factors of an example must grow as the weight of its
own loss does, and not with the weights of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_dp.errors import PreflightError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size, take
from hf_dp.per_example.checks.draws import Change, Draws
from hf_dp.per_example.checks.numbers import Numbers, under_numbers_alike
from hf_dp.per_example.checks.observed import Observed, aligned
from hf_dp.per_example.checks.values import parts
from hf_dp.per_example.ieee import beneath_modes, full_precision
from hf_dp.per_example.norms import squared_norms
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rule import Readings, Rule
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.watch import Observer, Watch
from hf_dp.randomness import unchanged_global_state

_Watching = Callable[[int, Observer], Watch]
_NONE: Readings = MappingProxyType({})
# Arrangements of two examples: each beside the other, and each beside itself alone; and the first without a copy, which
# could hide what is taken from the nearest row.
_MIXED, _ONLY_FIRST, _ONLY_SECOND, _SINGLE = (0, 1, 1, 0, 0), (0,) * 5, (1,) * 5, (0, 1, 1, 1, 1)
_MIXING_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 5e-2
# Relative to the example's gradient of one parameter, plus a share of its whole gradient, where only rounding is left.
_SHARE_TOLERANCE, _NEGLIGIBLE = 1e-3, 1e-3
# A weight at which a hook, or a Function, bounds the gradients of a whole micro-batch, if it does at any.
_BEYOND = 2.0**30


def check_independence(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    rules: Mapping[Any, Rule] = RULES,
    readings: Readings = _NONE,
) -> None:
    """Checks that every input of every use, and every loss, has one row for each example that depends on it alone.

    What is read as constant must not move at all.

    Three forward passes over five rows made of two examples, with dropout off and the model in the mode that it is in.
    Where other randomness is left, rows are compared under the same random numbers, also of the first without a copy,
    and again in eval mode, where all examples have the same.

    Nothing can be seen, and nothing is checked, where all examples are the same.

    Raises:
        PreflightError: a shape was misread, or examples mix.
    """
    pair = different_pair(batch)
    if pair is None:
        return
    batch = take(batch, pair)

    def watch(size: int, observe: Observer) -> Watch:
        return Watch(Reader(size, readings=readings), rules, observe)

    mixing = functools.partial(_mixing, model, loss_fn, batch, watch)
    with forked_rng(model):
        with NoDropout():
            found = mixing()
            is_random = found is not None and draws_numbers(model, loss_fn, take(batch, _MIXED))
        if is_random:
            found = mixing(in_place=True) or mixing(_SINGLE, in_place=True)
            with in_mode(model, training=False):
                under_numbers_alike(lambda numbers: _refuse(found or mixing(numbers=numbers)))
        else:
            _refuse(found)


def check_without_dropout(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, rules: Mapping[Any, Rule], readings: Readings
) -> None:
    """`check_independence` where dropout alone draws numbers: what mixes examples without it is no fault of it."""
    with forked_rng(model), NoDropout():
        is_random = draws_numbers(model, loss_fn, batch)
    if not is_random:
        check_independence(model, loss_fn, batch, rules=rules, readings=readings)


def check_shares(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    rules: Mapping[Any, Rule] = RULES,
    readings: Readings = _NONE,
    once: dict[str, Tensor] | None = None,
) -> None:
    """Checks that an example's gradient is scaled by the weight of its own loss, and by nothing else.

    Three forward and backward passes under the same random numbers. The weights are powers of two, so that rounding is
    the same in all; in the last one in three is beyond any bound, and only what others become beside it is looked at.

    Args:
        model: see `check_independence`, as for the others.
        once: what `parameter_norms` gave for weights of one, of the same model in the same mode that drew nothing.

    Raises:
        PreflightError: a shape was misread, or examples mix.
    """
    size = batch_size(batch)
    if size == 1:
        return
    steps = [2.0 ** (i % 7) for i in range(size)]
    beyond = [_BEYOND if i % 3 == min(2, size - 1) else step for i, step in enumerate(steps)]
    once = once or parameter_norms(model, loss_fn, batch, [1.0] * size, Watch(Reader(size, readings=readings), rules))
    whole = torch.stack(list(once.values())).nan_to_num(0, 0, 0).square().sum(0).sqrt()
    for weights in (steps, beyond):
        weighted = parameter_norms(model, loss_fn, batch, weights, Watch(Reader(size, readings=readings), rules))
        factor = torch.tensor(weights, dtype=torch.float64)
        for name, norms in once.items():
            expected, found = factor * norms, weighted[name]
            # What is scaled by a norm that even float16 does not hold is no number.
            comparable = expected.isfinite() & ~found.isinf() & (factor != _BEYOND)
            error = (found - expected).abs().where(comparable, 0) / factor
            if not bool((error <= _SHARE_TOLERANCE * (norms.where(comparable, 0) + _NEGLIGIBLE * whole)).all()):
                _refuse(f"the gradient of {name} for one example depends on the losses of others.")


def parameter_norms(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, weights: list[float], watch: Watch
) -> dict[str, Tensor]:
    """(B,) float64 on the CPU for each parameter: norms of the gradients of losses that are multiplied by weights."""

    def weighted(model: Any, batch: Any) -> Tensor:
        losses = loss_fn(model, batch)
        return losses * torch.tensor(weights, dtype=losses.dtype, device=losses.device)

    with forked_rng(model):
        losses = watch.run(model, weighted, batch)
    with torch.no_grad(), full_precision(losses.device), beneath_modes():
        return {name: squared_norms(uses)[0].double().sqrt().cpu() for name, uses in watch.factors.items() if uses}


def _refuse(found: str | None) -> None:
    if found is None:
        return
    raise PreflightError(
        found,
        why="either the example axis is read wrongly or examples mix, as in batch normalisation, losses normalised "
        "over the batch or with its other rows as negatives, packed sequences or capacity-limited experts; then "
        "clipping one example does not bound its influence.",
        fix="make the operation and the loss act on each example alone (negatives belong into the row), "
        "or freeze the parameter; keep dropout and padding as they are, they are not the cause.",
    )


def different_pair(batch: Batch) -> tuple[int, int] | None:
    """The first example and the first that differs from it, if any does."""
    tensors = [v for v in batch.values() if isinstance(v, Tensor)]
    later = range(1, batch_size(batch))
    return next(((0, i) for i in later if any(not torch.equal(v[0], v[i]) for v in tensors)), None)


def _mixing(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    watch: _Watching,
    mixed: Sequence[int] = _MIXED,
    in_place: bool = False,
    numbers: Numbers = nullcontext,
) -> str | None:
    runs = []
    for pattern in (mixed, _ONLY_FIRST, _ONLY_SECOND):
        with forked_rng(model), numbers(len(pattern)):
            runs.append(_observe(model, loss_fn, take(batch, pattern), watch))
    uses = aligned([seen for seen, _ in runs])
    if uses is None:
        return "the model used its parameters differently when the examples of the batch were exchanged."
    with beneath_modes():
        for use, *rows in uses:
            if not _rows_agree(*rows, mixed=mixed, in_place=in_place):
                return f"in {use.operation}, used by {use.parameter}, an example's row depends on its neighbours."
        if not _rows_agree(*(losses for _, losses in runs), mixed=mixed, in_place=in_place):
            return "an example's loss depends on its neighbours in the batch."
    return None


def _observe(model: nn.Module, loss_fn: LossFunction, batch: Batch, watch: _Watching) -> tuple[Observed, Tensor]:
    size = batch_size(batch)
    seen = Observed(model, size)
    watching = watch(size, seen)
    with watching.attached(model):
        losses = watching.forward(model, loss_fn, batch)
    return seen, losses.detach().reshape(size, 1)


def _rows_agree(
    together: Tensor, only_first: Tensor, only_second: Tensor, *, mixed: Sequence[int], in_place: bool
) -> bool:
    """Whether an example has the same row beside the other as beside itself, and (unless `in_place`) in every place."""
    if any(rows.shape != together.shape for rows in (only_first, only_second)):
        return False
    beside, *alone = (rows.unbind() for rows in (together, only_first, only_second))
    pairs = [(row, alone[example][i]) for i, (row, example) in enumerate(zip(beside, mixed, strict=True))]
    if not in_place:
        pairs += [(row, rows[0]) for rows in alone for row in rows[1:]]
    return all(close(x, y) for x, y in pairs)


def close(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if x.layout is not torch.strided or y.layout is not torch.strided:
        both = zip(parts(x), parts(y), strict=False)  # of one layout as many
        return x.layout == y.layout and all(a.shape == b.shape and close(a, b) for a, b in both)
    # Most are the same to the bit, which is found out at once.
    if torch.equal(x, y) or not x.is_floating_point():
        return torch.equal(x, y)
    tolerance = _MIXING_TOLERANCE.get(x.dtype, _LOW_PRECISION_TOLERANCE)
    x, y = x.double(), y.double()
    finite = x.isfinite() & y.isfinite()
    same_elsewhere = bool(x.isfinite().eq(y.isfinite()).all())
    x, y = x.where(finite, 0), y.where(finite, 0)
    return same_elsewhere and bool((x - y).norm() <= tolerance * torch.maximum(x.norm(), y.norm()) + 1e-12)


@torch.no_grad()
def draws_numbers(model: nn.Module, loss_fn: LossFunction, batch: Batch) -> bool:
    """Whether `model` draws a random number here. Two losses would be the same by chance where a coin falls rarely."""
    draws = Draws(batch_size(batch), Change())
    with draws.attached():
        loss_fn(model, batch)
    return bool(draws.seen) or draws.has_unseen


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """`model` in training or eval mode, each module put back at the end."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def letting_go(model: nn.Module, numbers: Numbers) -> Numbers:
    """The same `numbers`; before and after, modules let go, by their own `train`, of what they keep for evaluation
    alone (LeViT its biases of positions, with the graph that they came from)."""

    def let_go() -> None:
        if any(type(module).train is not nn.Module.train for module in model.modules()):
            with in_mode(model, training=True):
                pass

    @contextmanager
    def within(size: int) -> Iterator[None]:
        let_go()
        try:
            with numbers(size):
                yield
        finally:
            let_go()

    return within


@contextmanager
def forked_rng(model: nn.Module) -> Iterator[None]:
    """Random state, also numpy's and Python's, is put back at the end."""
    with unchanged_global_state():
        yield


class NoDropout(TorchFunctionMode):
    """Dropout becomes the identity, so that two forward passes can be compared in training mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, as most of what it is asked for
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        return func(*args, **kwargs)
