"""Are the random effects of different examples independent? What draws one coin for all of them is switched off.

An example more or less moves others into another micro-batch. If one coin falls for a whole micro-batch, it falls
otherwise for them there, and the clipped sum moves by more than C.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hf_dp.errors import HfDpError, PreflightError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size, take
from hf_dp.per_example.checks.copies import Run, differing_copies, follows_number, moved_rows
from hf_dp.per_example.checks.draws import Change, Draw, Draws
from hf_dp.per_example.checks.independence import check_without_dropout, parameter_norms
from hf_dp.per_example.checks.observed import Observed
from hf_dp.per_example.checks.switches import Switches, warn_of
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rule import Readings, Rule, Use
from hf_dp.per_example.watch import Watch

_EXTREMES = ("least", "most", "another")
# Seeds that are tried where numbers come from functions that are not seen.
_UNSEEN = 64
# Whatever a model makes of such numbers.
_FAILED = ArithmeticError, HfDpError, IndexError, RuntimeError, TypeError, ValueError


def without_shared_coins(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    rules: Mapping[Any, Rule],
    readings: Readings,
    switches: Switches,
) -> None:
    """Checks that no random number moves two examples; dropout modules with one mask for all are switched off.

    In the mode that the model is in. Every number that is drawn, from torch, numpy or Python, is replaced in turn:
    those of one example must move no other, and those that belong to no example must move one at most, even where they
    are as small or as large as in 1,024 draws (so that a coin that falls once in a hundred times is not missed).

    Args:
        batch: as many examples as no other axis is long, all of which count (see `that_count`).
        switches: notes what is switched off.

    Raises:
        PreflightError: with the operation and the module that draws.
    """
    size = batch_size(batch)

    def observed(batch: Batch = batch) -> tuple[list[Use], list[Tensor]]:
        seen = Observed(model, size)
        watch = Watch(Reader(size, readings=readings), rules, seen)
        with watch.attached(model):
            losses = watch.forward(model, loss_fn, batch)
        uses = [use for use, _ in seen.seen]
        return uses, [*(rows for _, rows in seen.seen), losses.detach().reshape(size, 1)]

    off, before = dict[str, str](), _states(model)
    with _named(model) as stack:
        while found := shared_draws(observed, size, lambda: stack[-1] if stack else ""):
            if not found[0].is_shared:
                check_without_dropout(model, loss_fn, batch, rules=rules, readings=readings)
            dropouts = {draw.place: m for draw in found if isinstance(m := model.get_submodule(draw.place), _DropoutNd)}
            if found[0].place not in dropouts or off.keys() & dropouts.keys():  # the model switches it on again
                raise _refusal(found[0], type(model).__name__)
            for name, module in dropouts.items():
                off[name] = switches.turn_off(module, "p", 0.0, f"{name}.p={module.p}")
        copies = take(batch, [0] * size)
        # Also where nothing was drawn: a model may draw where rows are alike.
        if drawn := differing_copies(lambda: observed(copies), size, lambda: stack[-1] if stack else ""):
            raise _refusal_of_place(drawn, type(model).__name__)
        if follows_number(model, loss_fn, batch, rules=rules, readings=readings):
            raise PreflightError(
                "an example's gradient follows from how many examples are beside it, under the same random numbers.",
                why="one example more or less would change the gradients of all others in its micro-batch.",
                fix="make the loss and each operation act on each example alone.",
            )
    if _states(model) != before:
        raise _unseen("a generator of its own")
    if off:
        warn_of([*off.values()])


def that_count(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, rules: Mapping[Any, Rule], readings: Readings
) -> list[int]:
    """The examples that have a gradient, however the numbers fall that belong to no example; all where none has.

    What moves an example that adds nothing (no label, weight 0) is not seen, so others are looked at.
    """
    size, found = batch_size(batch), set[int]()
    for extreme in ("", "least", "most"):
        try:
            norms, draws = drawn_norms(model, loss_fn, batch, Change(extreme=extreme), rules=rules, readings=readings)
        except torch.OutOfMemoryError:
            raise
        except _FAILED:
            if not extreme:
                raise
            continue
        found |= set(with_gradient(norms))
        if not any(draw.is_shared for draw in draws.seen):
            break
    return sorted(found) or list(range(size))


def drawn_norms(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    change: Change,
    *,
    rules: Mapping[Any, Rule],
    readings: Readings,
) -> tuple[dict[str, Tensor], Draws]:
    """`parameter_norms` of the losses as they are, and what was drawn meanwhile."""
    size = batch_size(batch)
    draws = Draws(size, change)
    with draws.attached():
        norms = parameter_norms(model, loss_fn, batch, [1.0] * size, Watch(Reader(size, readings=readings), rules))
    return norms, draws


def with_gradient(norms: Mapping[str, Tensor]) -> list[int]:
    """The examples with a finite gradient that is not 0, by the norms (B,) for each parameter."""
    whole = torch.stack(list(norms.values())).sum(0)
    found: list[int] = (whole.isfinite() & whole.ne(0)).nonzero().flatten().tolist()
    return found


def shared_draws(run: Run, size: int, place: Callable[[], str]) -> list[Draw]:
    """None, or a draw in `run` that moves more than one of `size` examples, and others that belong to no example.

    Args:
        run: what is observed: the uses, and tensors with one row for each example (or one for all).
        place: where a draw is made, at that moment.

    Raises:
        PreflightError: numbers that cannot be replaced move an example.
    """

    def observed(change: Change) -> tuple[Draws, tuple[list[Use], list[Tensor]]]:
        draws = Draws(size, change, place)
        with draws.attached():
            return draws, run()

    usual, before = observed(Change())
    everyone = set(range(size))

    def moved(change: Change) -> set[int]:
        try:
            uses, rows = observed(change)[1]
        except torch.OutOfMemoryError:
            raise
        except _FAILED:
            return everyone  # Whatever the model makes of such a number, it is moved by it.
        return everyone if uses != before[0] else moved_rows(before[1], rows, everyone)

    def moves_others(is_interleaved: bool) -> bool:
        return any(
            row in moved(Change(row, extreme, is_interleaved=is_interleaved)) for row in (0, 1) for extreme in _EXTREMES
        )

    if usual.has_own_generator or moved(Change()):
        raise _unseen("a generator of its own") if usual.has_own_generator else _differing()
    # Generators are looked at where something is drawn.
    again = observed(Change(start=1))[0].states if usual.states else []
    if any(one == other for pair in zip(usual.states, again, strict=False) for one, other in zip(*pair, strict=True)):
        raise _unseen("a generator that it seeds itself")
    if usual.has_unseen and any(moved(Change(start=start)) for start in range(1, _UNSEEN)):
        raise _unseen("a function that is not called as random.f or numpy.random.f (`from random import ...`)")
    shared = [index for index, draw in enumerate(usual.seen) if draw.is_shared]
    together = set().union(*(moved(Change(extreme=extreme)) for extreme in _EXTREMES)) if shared else set()
    explained: set[int] = set()
    for index in shared if together else ():
        alone = [moved(Change(extreme=extreme, only=index)) for extreme in _EXTREMES]
        explained |= set().union(*alone)
        if max(map(len, alone)) > 1 or (index == shared[-1] and not together <= explained):
            return [usual.seen[i] for i in (index, *shared)]
    own = [draw for draw in usual.seen if not draw.is_shared]
    return own[:1] if own and all(map(moves_others, (False, True))) else []


class NotingDraws:
    """The losses of a batch; which random numbers are drawn for them is noted.

    Attributes:
        drawn: each by its operation and its module.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        self._model, self._loss_fn = model, loss_fn
        self.drawn: set[tuple[str, str]] = set()

    def __call__(self, batch: Batch) -> Tensor:
        with _named(self._model) as stack:
            draws = Draws(1, Change(), lambda: stack[-1] if stack else "")
            with draws.attached():
                losses = self._loss_fn(self._model, batch)
        self.drawn |= {(draw.name, draw.place) for draw in draws.seen}
        self.drawn |= {("unseen", "")} if draws.has_unseen else set()
        return losses


def _states(model: nn.Module) -> list[Any]:
    """What the generators are at that modules hold."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return [
        value.get_state().numpy().tobytes() if isinstance(value, torch.Generator)
        else value.getstate() if isinstance(value, random.Random)
        else repr(value.bit_generator.state) if isinstance(value, np.random.Generator)
        else repr(value.get_state(legacy=False))
        for value in values
        if isinstance(value, (torch.Generator, random.Random, np.random.Generator, np.random.RandomState))
    ]  # fmt: skip


@contextmanager
def _named(model: nn.Module) -> Iterator[list[str]]:
    """The names of the modules that are running, the innermost last."""
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            running.append(names[module])

    def leave(module: nn.Module, *_: Any) -> None:
        if module in names:
            running.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _unseen(source: str) -> PreflightError:
    return PreflightError(
        f"the model or its loss draws random numbers from {source}.",
        why="nobody can tell which example they belong to, nor seed them from the operating system.",
        fix="draw from torch's global generator, with numbers of its own for each example: torch.rand(examples, ...).",
    )


def _differing() -> PreflightError:
    return PreflightError(
        "the model or its loss computes something else when it is called again with the same rows and random numbers: "
        "it counts, remembers, or draws from a generator of its own.",
        why="an example's gradient would follow from what was computed before it.",
        fix="compute from the rows, the parameters and torch's global generator alone; what changes as training goes "
        "on belongs in a TrainerCallback, between two steps. Spectral norms take a step in each pass: fold them into "
        "the weights (remove_parametrizations, or remove_spectral_norm), or take weight_norm.",
    )


def _refusal(draw: Draw, kind: str) -> PreflightError:
    drawn = f"{draw.name} of shape {draw.shape} in {draw.place or kind}"
    if not draw.is_shared:
        return PreflightError(
            f"an example is moved by random numbers of its neighbours: {drawn}.",
            why="examples mix, there or in what is computed from it (a mean over the batch, say), so clipping one "
            "example does not bound its influence.",
            fix="make each operation from there to the loss act on each example alone, with random numbers of its own; "
            "dropout by itself is not the cause.",
        )
    return PreflightError(
        f"one random number moves several examples: {drawn}.",
        why="an example more or less moves others into another micro-batch, where the number is another one, and then "
        "the clipped sum moves by more than one example's bound.",
        fix="switch it off in the model's config, or give each example numbers of its own: torch.rand(examples, ...), "
        "from torch's global generator.",
    )


def _refusal_of_place(draw: Draw, kind: str) -> PreflightError:
    return PreflightError(
        f"random numbers move copies of one example by their places in the micro-batch: {draw.name} of shape "
        f"{draw.shape} in {draw.place or kind}.",
        why="an example more or less gives others another place, and then the clipped sum moves by more than one "
        "example's bound.",
        fix="treat each example alike, with random numbers of its own: torch.rand(examples, ...).",
    )
