"""What uses are given in one pass, for each example: a copy of its rows, to be compared with those of another pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hf_dp.per_example.checks.memory import told_in_place
from hf_dp.per_example.checks.values import parts
from hf_dp.per_example.rule import ROUTED, Axis, Use


class Observed:
    """Notes what uses are given.

    Of rows that were picked, or taken out by a loop, an example may have any number, in several calls; they are told
    by sums over them, which are no others where its neighbours have more.

    Args:
        model: whose frozen parameters are not copied.
        size: how many examples there are, B.
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        self._rows_of, self._size = observer(model), size
        self._seen: list[tuple[Use, Tensor]] = []
        # By how long these sums are, too: a layer may be given rows of two lengths.
        self.picked: dict[tuple[Use, int], Tensor] = {}

    def __call__(self, use: Use, given: Tensor, axis: Axis) -> None:
        # An expert's matrix is taken by its number where it has any rows, and these are told.
        if use.operation == "getitem" and use.reading == "constant" and not given.dim():
            return
        rows = self._rows_of(given, axis)
        if axis.example is not None:
            sums = rows.new_zeros(self._size, 5, dtype=torch.double)
            sums[axis.example[0]] = _told(rows)
            self._add(use, sums)
        elif use.reading == ROUTED:
            self._add(use, _sums(rows.view(len(rows), -1, max(given[:1].numel(), 1)), axis))
        else:
            self._seen.append((use, rows.expand(self._size, -1)))

    def _add(self, use: Use, sums: Tensor) -> None:
        key = use, sums.shape[1]
        self.picked[key] = self.picked[key] + sums if key in self.picked else sums

    @property
    def seen(self) -> list[tuple[Use, Tensor]]:
        """Each use, in order, with the rows (B, n)."""
        return [*self._seen, *((use, sums) for (use, _), sums in sorted(self.picked.items(), key=lambda one: one[0]))]


def aligned(several: Sequence[Observed]) -> list[tuple[Use, *tuple[Tensor, ...]]] | None:
    """Each use with its rows in several passes; None if they are others. What no row was picked for may be missing."""
    for key in set().union(*(one.picked for one in several)):
        known = next(one.picked[key] for one in several if key in one.picked)
        for one in several:
            one.picked.setdefault(key, torch.zeros_like(known))
    seen = [one.seen for one in several]
    if any([use for use, _ in one] != [use for use, _ in seen[0]] for one in seen):
        return None
    return [(found[0][0], *(rows for _, rows in found)) for found in zip(*seen, strict=True)]


def observer(model: nn.Module) -> Callable[[Tensor, Axis], Tensor]:
    """What gives a copy of what an operation is given, for each example, or (1, n) for all of them; of frozen
    parameters of `model` a checksum, since a pass may write examples into them, and write back what was there."""
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}

    def rows_of(given: Tensor, axis: Axis) -> Tensor:
        is_constant = axis.reading == "constant"
        if is_constant and id(given) in frozen:
            return told_in_place(given)[None]
        if is_constant and given.layout is not torch.strided:
            return torch.cat([part.double().flatten() for part in parts(given.detach())])[None]
        return given.detach().to_dense().clone().reshape(1 if is_constant else axis.batch_size, -1)

    return rows_of


def _told(rows: Tensor) -> Tensor:
    """(5,) what tells the numbers of one example, of which there may be any number, from others."""
    own = rows.double().flatten()
    weights = torch.arange(len(own), device=own.device, dtype=torch.double).cos()
    number = own.new_full((), len(own))
    return torch.stack([number, own.sum(), own.abs().sum(), own.square().sum(), own @ weights])


def _sums(rows: Tensor, axis: Axis) -> Tensor:
    """(B, 1 + 3 f) of the rows (B, k, f) of each example, those left out that come again."""
    used = None if axis.order is None else axis.order.used
    is_own = rows.new_ones(rows.shape[:2]) if used is None else used.view(rows.shape[:2])
    own = rows.double().masked_fill(~is_own.bool()[..., None], 0)
    number = is_own.sum(1, keepdim=True, dtype=torch.double)
    return torch.cat([number, own.sum(1), own.abs().sum(1), own.square().sum(1)], 1)
