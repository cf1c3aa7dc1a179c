"""Does what a model makes of one example change the gradients of others? Asked with outputs that are far apart.

Before training a model makes about the same of all examples: hardly one is sure, or far from right. What a loss decides
for a whole micro-batch by that (a bound at a multiple of its median, a skip where one loss is too large, only those
that are hard) begins when the model has learnt something, and no row shows it before.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size, take
from hf_dp.per_example.checks.beside import beside
from hf_dp.per_example.checks.enough_bits import computed, in_enough_bits
from hf_dp.per_example.checks.moved import moved_by
from hf_dp.per_example.checks.named import is_own, named_in
from hf_dp.per_example.checks.numbers import Numbers
from hf_dp.per_example.checks.padding import tolerance_of
from hf_dp.per_example.ieee import beneath_modes
from hf_dp.per_example.record import PerExampleGradients, record
from hf_dp.per_example.rule import Certificate, Rule, refuse_differing
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import is_sharded

# What is added to a row of outputs: a wave of this height over its last axis, that begins here. In one of three most
# classes are far above or below the others. The first adds nothing.
_LARGE, _SIZES, _BEGINS = 100.0, (4.0, 8.0), (0.0, 2 * math.pi / 3, 4 * math.pi / 3)
_OWN = ((0.0, 0.0), *((size, begin) for size in (*_SIZES, _LARGE) for begin in _BEGINS))
_OTHERS = tuple((_LARGE, begin) for begin in _BEGINS)
# Beyond any bound, and what a model makes that has diverged.
_BEYOND = ((_LARGE**3, 0.0), (math.inf, 0.0), (math.nan, 0.0))
# Of one place to the next, not the same after few.
_WAVE = math.pi * (3 - math.sqrt(5))
# It goes beside each row, as its numbers do, past the model.
_ADDED = "added, to outputs"


def check_outputs_apart(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    certificate: Certificate,
    rules: Mapping[Any, Rule] = RULES,
    tables: Collection[str] = (),
    is_known: bool = False,
) -> None:
    """Checks that an example's gradient and loss stay what they are, whatever the model's outputs for others are.

    For a loss of the user's own, and a model of a class of the user's. To what the model returns, or to what its last
    layer does, where that is rows of examples, small and large numbers are added, others to each row. Precision, mode
    and random numbers are as of `in_enough_bits`. Nothing is asked of what calls neither, or cannot be computed so, nor
    of shards.

    Args:
        batch: two examples or more, short ones.
        is_known: whether the loss is known to look at no other row than its own.

    Raises:
        PreflightError: a gradient moves.
    """
    of_layers = any(is_own(type(module)) for module in model.modules())
    if is_sharded(model) or (is_known and not of_layers):
        return
    tolerance, outputs = tolerance_of(model), _Apart(loss_fn, None if is_known else model, of_layers)
    known: dict[str, Any] = {"certificate": certificate, "rules": rules, "tables": tables}

    def says_nothing(dtype: torch.dtype) -> None:
        if dtype == torch.float64:
            raise ArithmeticError  # of what was refused in float32

    def refuse_moved(batch: Batch, dtype: torch.dtype, numbers: Numbers) -> None:
        def gradients(batch: Batch) -> PerExampleGradients:
            with numbers(batch_size(batch)):
                found = record(model, outputs, batch, **known)
            refuse_differing(found.differing)
            return found

        norms = gradients(_added(batch, _OWN[:1] * batch_size(batch))).squared_norms().sqrt()
        adds = [i for i, norm in enumerate(norms.tolist()) if 0 < norm < math.inf]
        if not adds or len(norms) < 2:
            return says_nothing(dtype)
        own, other = adds[0], 1 if adds[0] == 0 else 0
        if not outputs.settled(lambda: gradients(_added(take(batch, [own]), _OWN[:1]))):
            return says_nothing(dtype)
        rows = [(own, one) for one in _OWN] + [(other, one) for one in _OTHERS]
        alone = computed(lambda: [gradients(_added(take(batch, [i]), [one])) for i, one in rows])
        if alone is None:
            return says_nothing(dtype)  # it takes no such outputs

        def moved(which: list[int]) -> bool:
            of, added = zip(*(rows[place] for place in which), strict=True)
            together = gradients(_added(take(batch, of), added))
            with beneath_modes():
                return any(
                    not moved_by(model, together, at, alone[place], tables, norms) <= tolerance
                    for at, place in enumerate(which)
                )

        # All at once; and the one as it is beside what is easier alone, or harder.
        losses = [float(one.losses[0]) for one in alone]
        easier, harder = ([i for i in range(1, len(rows)) if sign * (losses[i] - losses[0]) > 0] for sign in (-1, 1))
        for which in ([*range(len(rows))], [0, *easier], [0, *harder]):
            if (found := computed(functools.partial(moved, which))) is None:
                says_nothing(dtype)
            if found:
                raise _moves()

        loss, norm = _told(alone[0])

        def decides(beyond: tuple[float, float]) -> bool:
            beside = _told(gradients(_added(take(batch, [own, other]), [_OWN[0], beyond])))
            # A term of the whole batch whose factor is 0 decides nothing, and is NaN beside what is infinite.
            moved = abs(beside[0] - loss) > tolerance * max(1, abs(loss)) or abs(beside[1] - norm) > tolerance * norm
            return moved and math.isfinite(beside[0]) and math.isfinite(beside[1])

        if any(computed(functools.partial(decides, beyond)) for beyond in _BEYOND):
            raise _moves()

    in_enough_bits(model, loss_fn, batch, refuse_moved)


def _told(found: PerExampleGradients) -> list[float]:
    """Of its first example the loss, and the norm of its gradient."""
    with beneath_modes():
        return [float(found.losses[0].double()), float(found.squared_norms()[0].double().sqrt())]


def _added(batch: Batch, waves: Collection[tuple[float, float]]) -> dict[str, Any]:
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    return {**batch, _ADDED: torch.tensor(list(waves), device=device)}


class _Apart:
    """The losses of a batch, of outputs that have added to them what it says, once it is `settled` which these are.

    Args:
        loss_fn: computes them.
        model: whose outputs are meant, and those of modules that the loss holds; None for its layers' alone.
        of_layers: whether what the last layer gives is meant; also where the model as a whole is not called.
    """

    def __init__(self, loss_fn: LossFunction, model: nn.Module | None, of_layers: bool) -> None:
        self._loss, self._model, self._of_layers = loss_fn, model, of_layers
        # A teacher too, which the loss holds or names.
        named = named_in(loss_fn) if isinstance(loss_fn, types.FunctionType) else ()
        others = () if model is None else (*beside(model, loss_fn), *named)
        self._whole = [one for _, one in (("", model), *others) if isinstance(one, nn.Module)]
        # By module, and names within what it gives: whether that has a row for each example. The last one comes last.
        self._fits: dict[tuple[Any, ...], bool] = {}
        self._chosen: set[tuple[Any, ...]] | None = None

    def settled(self, once_more: Callable[[], Any]) -> bool:
        """Whether there are such outputs, by a pass that was, and another of one example (the first time)."""
        if self._chosen is None:
            once_more()
            fits = [place for place, has_rows in self._fits.items() if has_rows]
            whole = {place[0] for place in fits if place[0] in self._whole}
            last = next((place[0] for place in reversed(fits) if place[0] not in self._whole), None)
            meant = {*whole, last} if self._of_layers or self._model not in whole else whole
            self._chosen = {place for place in fits if place[0] in meant}
        return bool(self._chosen)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        layers = [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]
        at = functools.partial(self._at, batch[_ADDED])
        hooks = [module.register_forward_hook(at) for module in dict.fromkeys([*layers, *self._whole])]
        try:
            return self._loss(model, {name: value for name, value in batch.items() if name != _ADDED})
        finally:
            for hook in hooks:
                hook.remove()

    def _at(self, waves: Tensor, module: nn.Module, given: Any, output: Any) -> Any:
        return self._with(output, waves, (module,))

    def _with(self, value: Any, waves: Tensor, place: tuple[Any, ...]) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            if self._chosen is None:
                has_rows = value.ndim > 0 and len(value) == len(waves)
                self._fits[place] = self._fits.pop(place, True) and has_rows
            return _raised(value, waves) if place in (self._chosen or ()) else value
        if isinstance(value, dict):
            for name in list(value):
                value[name] = self._with(value[name], waves, (*place, name))
            return value
        if type(value) in (list, tuple):
            return type(value)(self._with(one, waves, (*place, i)) for i, one in enumerate(value))
        return value


def _raised(value: Tensor, waves: Tensor) -> Tensor:
    size, begin = waves.to(value.dtype).unbind(1)
    if value.ndim == 1:
        return value + size * begin.cos()
    places = torch.arange(value.shape[-1], device=value.device)
    wave = size[:, None] * (begin[:, None] + _WAVE * places).cos()
    return value + wave.view(len(value), *[1] * (value.ndim - 2), -1)


def _moves() -> PreflightError:
    return PreflightError(
        "an example's gradient is another where the model's outputs for other examples are large, or no numbers.",
        why="what is decided for the whole micro-batch by what the model makes of few (a bound at a multiple of the "
        "median, a skip where one loss is large or NaN) begins when it has learnt something, or diverges, and moves "
        "what others add beyond the clipping bound.",
        fix="decide it for each example by itself, or by a constant: of public data, or of a private release.",
    )
