"""Engine against oracle on this model, before the first step; and: does any example see another?

Shapes alone cannot tell which axis is the example axis (T5's relative positions are (T, T)), and no per-example
gradient exists where examples mix (batch norm, a loss normalised over the batch). Both are looked for here by running
a handful of examples in known patterns and comparing rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from hf_dp.errors import PreflightError, UnsupportedModelError
from hf_dp.per_example.batch import Batch, batch_size, take
from hf_dp.per_example.oracle import loop
from hf_dp.per_example.record import Certificate, LossFunction, PerExampleGradients, check_losses, record
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.watch import Axis, Rule, Use, Watch

# Two arrangements of two examples a, b. Rows of one example must agree within an arrangement and between them.
_FIRST, _SECOND = (0, 1, 1, 0, 0), (0, 0, 0, 0, 1)
_MIXING_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_EXACTNESS_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 5e-2


def preflight(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, rules: Mapping[Any, Rule] = RULES
) -> Certificate:
    """Certifies the uses of `model`'s parameters on a few examples of `batch`, before anything is released.

    Two checks: no example's loss or activations move when its neighbours change, with dropout switched off and the
    model in the mode that it is in; and norms and weighted sums of the engine equal those of a loop over single
    examples (in eval mode, since dropout masks cannot be repeated there). Random state and `.grad` are left alone.

    Returns:
        The certificate for `record`.

    Raises:
        UnsupportedModelError: batch normalisation in training mode, or anything that `record` refuses.
        PreflightError: examples mix, or engine and oracle disagree.
    """
    check_modules(model)
    with _forked_rng(model):
        check_independence(model, loss_fn, batch, rules=rules)
        size = _coprime_size(batch)
        few = take(batch, [i % batch_size(batch) for i in range(size)])
        with _mode(model, training=False):
            engine = record(model, loss_fn, few, certificate=None, rules=rules)
            oracle = loop(model, loss_fn, few)
    _compare(engine, oracle, _dtype(model))
    return Certificate(engine.uses)


def check_modules(model: nn.Module) -> None:
    """Refuses by name what mixes examples in training mode, and a model with nothing to train.

    Raises:
        UnsupportedModelError: with the module's name.
    """
    with _mode(model, training=True):
        mixing = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if mixing:
        name, module = mixing[0]
        raise UnsupportedModelError(
            f"{name or 'the model'} is batch normalisation ({type(module).__name__}) in training mode.",
            why="it computes each example's output from the whole batch, so no per-example gradient exists.",
            fix="replace it by GroupNorm or LayerNorm, or override its train() so that it stays in eval mode.",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedModelError(
            "the model has no trainable parameter.",
            why="there is nothing to train, and epsilon would be spent for nothing.",
            fix="unfreeze some parameters (requires_grad_(True)), or add an adapter with PEFT.",
        )


def check_independence(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, rules: Mapping[Any, Rule] = RULES
) -> None:
    """Checks that every input of every use, and every loss, has one row for each example that depends on it alone.

    Two forward passes over five rows made of the first two examples. A batch of one example is in order by itself.

    Raises:
        PreflightError: a shape was misread, or examples mix.
    """
    if batch_size(batch) == 1:
        return
    found: str | None = None
    with _forked_rng(model), torch.no_grad():
        for context in (_NoDropout(), _mode(model, training=False)):
            with context:
                found = _mixing(model, loss_fn, batch, rules)
                if found is None:
                    return
                if not _is_random(model, loss_fn, batch):
                    break
    raise PreflightError(
        str(found),
        why="either the example axis is read wrongly or examples mix, as in batch normalisation, losses normalised "
        "over the batch, packed sequences or capacity-limited experts; then clipping one example does not bound its "
        "influence.",
        fix="make the operation act on each example alone, or freeze the parameter; keep dropout and padding as they "
        "are, they are not the cause.",
    )


def check_padding(
    model: nn.Module, loss_fn: LossFunction, examples: Sequence[Any], collate: Callable[[list[Any]], Batch]
) -> None:
    """Checks that an example's loss is the same alone and beside longer examples, which it is padded to.

    A collator that draws at random (masked language modelling) cannot be compared with itself and is left out.

    Args:
        examples: a few, of different lengths where possible.
        collate: list of examples -> batch.

    Raises:
        PreflightError: padding changes an example's loss, so one long example would change all its neighbours.
    """
    with _forked_rng(model), _mode(model, training=False), torch.no_grad():
        once, again = collate(list(examples)), collate(list(examples))
        if any(isinstance(v, Tensor) and not torch.equal(v, again[k]) for k, v in once.items()):
            return
        together = loss_fn(model, once)
        for i, example in enumerate(examples):
            alone = loss_fn(model, collate([example]))[0]
            if not _close(together[i].reshape(1), alone.reshape(1)):
                raise PreflightError(
                    f"an example's loss is {float(alone):.6g} by itself and {float(together[i]):.6g} in a batch.",
                    why="it depends on how far the collator padded it, so one long example would change the gradients "
                    "of its neighbours, beyond what clipping bounds.",
                    fix="pad on the right with an attention mask (tokenizer.padding_side = 'right'), or pad every "
                    "example to one fixed length (padding='max_length').",
                )


def _mixing(model: nn.Module, loss_fn: LossFunction, batch: Batch, rules: Mapping[Any, Rule]) -> str | None:
    first, first_losses = _observe(model, loss_fn, take(batch, _FIRST), rules)
    second, second_losses = _observe(model, loss_fn, take(batch, _SECOND), rules)
    if [use for use, _ in first] != [use for use, _ in second]:
        return "the model used its parameters differently when the examples of the batch were rearranged."
    for (use, one), (_, two) in zip(first, second, strict=True):
        if not _rows_agree(one, two):
            return f"in {use.operation}, used by {use.parameter}, an example's row depends on its neighbours."
    if not _rows_agree(first_losses, second_losses):
        return "an example's loss depends on its neighbours in the batch."
    return None


def _observe(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, rules: Mapping[Any, Rule]
) -> tuple[list[tuple[Use, Tensor]], Tensor]:
    seen: list[tuple[Use, Tensor]] = []

    def observe(use: Use, given: Tensor, axis: Axis) -> None:
        seen.append((use, given.reshape(axis.batch_size, -1).detach().clone()))

    size = batch_size(batch)
    with Watch(size, rules, observe=observe).attached(model):
        losses = loss_fn(model, batch)
    check_losses(losses, size)
    return seen, losses.reshape(size, 1)


def _rows_agree(one: Tensor, two: Tensor) -> bool:
    """Rows of `one` are a b b a a, rows of `two` are a a a a b."""
    a, b = one[0], one[1]
    pairs = [(one[3], a), (one[4], a), (one[2], b), (two[4], b), *((two[i], a) for i in range(4))]
    return all(_close(x, y) for x, y in pairs)


def _close(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point():
        return bool(x.eq(y).all())
    tolerance = _MIXING_TOLERANCE.get(x.dtype, _LOW_PRECISION_TOLERANCE)
    x, y = x.double(), y.double()
    finite = x.isfinite() & y.isfinite()
    same_elsewhere = bool(x.isfinite().eq(y.isfinite()).all())
    x, y = x.where(finite, 0), y.where(finite, 0)
    return same_elsewhere and bool((x - y).norm() <= tolerance * torch.maximum(x.norm(), y.norm()) + 1e-12)


def _is_random(model: nn.Module, loss_fn: LossFunction, batch: Batch) -> bool:
    few = take(batch, _FIRST)
    return not _close(loss_fn(model, few).float(), loss_fn(model, few).float())


def _compare(engine: PerExampleGradients, oracle: PerExampleGradients, dtype: torch.dtype) -> None:
    tolerance = _EXACTNESS_TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)
    weights = torch.linspace(0.5, 1.5, engine.batch_size, device=engine.losses.device, dtype=torch.float64)
    # An example whose own gradient is not finite contributes nothing; it must be the same ones for both.
    found_norms, true_norms = engine.squared_norms().double().sqrt(), oracle.squared_norms().double().sqrt()
    finite = true_norms.isfinite()
    weights, found_norms, true_norms = (
        weights.where(finite, 0),
        found_norms.where(finite, 0),
        true_norms.where(finite, 0),
    )
    ours, truth = engine.weighted_sum(weights), oracle.weighted_sum(weights)
    whole = math.sqrt(sum(float(v.double().square().sum()) for v in truth.values()))
    checks = [("the norms", found_norms, true_norms, 0.0)]
    checks += [(name, ours[name], truth[name], 0.1 * whole) for name in truth]
    for name, found, expected, floor in checks:
        error = float((found.double() - expected.double()).norm())
        scale = max(float(expected.double().norm()), floor)
        if not error <= tolerance * scale + 1e-12:
            raise PreflightError(
                f"per-example gradients of {name} are off by {error:.2g} where the oracle's have norm {scale:.2g}.",
                why="clipping would act on wrong norms, so the noise would not cover an example's influence.",
                fix="freeze this parameter or train with LoRA, and please report the model: a rule is wrong.",
            )


def _coprime_size(batch: Batch) -> int:
    inner = {n for v in batch.values() if isinstance(v, Tensor) for n in v.shape[1:]} | {1}
    return next(k for k in (3, 5, 7, 11, 13, 17, 19, 23) if k == 23 or all(n % k for n in inner))


def _dtype(model: nn.Module) -> torch.dtype:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return torch.bfloat16
    return min(dtypes, key=lambda d: torch.finfo(d).bits)


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


@contextmanager
def _forked_rng(model: nn.Module) -> Iterator[None]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(d.index or 0 for d in devices)):
        yield


class _NoDropout(TorchFunctionMode):
    """Dropout becomes the identity, so that two forward passes can be compared in training mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.update({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        return func(*args, **kwargs)
