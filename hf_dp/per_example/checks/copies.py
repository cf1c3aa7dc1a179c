"""Do copies of one example come out alike, in whatever place and number, if all get the same random numbers?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.per_example.batch import Batch, LossFunction, take
from hf_dp.per_example.checks.draws import Change, Draw, Draws
from hf_dp.per_example.checks.independence import NoDropout, draws_numbers, parameter_norms
from hf_dp.per_example.checks.numbers import NumbersAlike
from hf_dp.per_example.checks.survey import telling_sizes
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rule import Readings, Rule, Use
from hf_dp.per_example.watch import Watch

_SAME = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION = 5e-2

Run = Callable[[], tuple[list[Use], list[Tensor]]]


def differing_copies(run: Run, size: int, place: Callable[[], str]) -> Draw | None:
    """A draw in `run` on `size` copies of one example, where these differ although all have the same numbers.

    Args:
        run: see `shared_draws`, as for `place`.
    """
    seen: list[Draw] = []

    def differ(is_interleaved: bool) -> bool:
        draws = Draws(size, Change(is_alike=True, is_interleaved=is_interleaved), place)
        with draws.attached():
            rows = [row for row in run()[1] if len(row) == size]
        seen[:] = draws.seen
        return bool(seen) and bool(moved_rows([row[:1].expand_as(row) for row in rows], rows, set(range(size))))

    return seen[0] if all(map(differ, (False, True))) else None


def follows_number(
    model: nn.Module, loss_fn: LossFunction, batch: Batch, *, rules: Mapping[Any, Rule], readings: Readings
) -> bool:
    """Whether more copies of the first example change its gradient, in a model with random numbers besides dropout's.

    All copies have the same numbers. Without such numbers batches of real examples can be held against each alone.
    """
    few, more = telling_sizes(model, batch)[:2]
    with NoDropout():
        if not draws_numbers(model, loss_fn, take(batch, [0] * few)):
            return False
    is_fine = {p.dtype for p in model.parameters()} <= _SAME.keys()

    def follows(is_interleaved: bool) -> bool:
        numbers = NumbersAlike(is_interleaved=is_interleaved)

        def norms(size: int) -> Tensor:
            watch = Watch(Reader(size, readings=readings), rules)
            with NoDropout(), numbers(size):
                found = parameter_norms(model, loss_fn, take(batch, [0] * size), [1.0] * size, watch)
            of_first = torch.stack([norms[:1] for norms in found.values()], 1)
            return of_first.to(torch.float32 if is_fine else torch.bfloat16)

        before = norms(few)
        return any(numbers.first) and bool(moved_rows([before], [norms(more)], {0}))

    return follows(is_interleaved=False) and follows(is_interleaved=True)


def moved_rows(before: list[Tensor], after: list[Tensor], everyone: set[int]) -> set[int]:
    """The examples of which any row is not what it was, rounding apart."""
    found: set[int] = set()
    for one, two in zip(before, after, strict=True):
        if one.shape != two.shape:
            return everyone
        if torch.equal(one, two):
            continue
        x, y = one.double().nan_to_num(0, 0, 0), two.double().nan_to_num(0, 0, 0)
        tolerance = _SAME.get(one.dtype, _LOW_PRECISION) if one.is_floating_point() else 0.0
        differ = (x - y).norm(dim=1) > tolerance * torch.maximum(x.norm(dim=1), y.norm(dim=1))
        found |= everyone if len(one) < len(everyone) and bool(differ.any()) else set(differ.nonzero()[:, 0].tolist())
    return found
