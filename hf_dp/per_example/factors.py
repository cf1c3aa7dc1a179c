"""Per-example gradients of one use of one parameter, without instantiating them where that would cost more.

For y = x W^T with x: (B, T, d) and output gradient g: (B, T, p), example i's gradient is the sum over positions of
outer products g_i[t] x_i[t]^T (Goodfellow 2015, arXiv:1510.01799). An embedding lookup is the same with one-hot rows.
`Outer` keeps the pair; its inner products need only two T x T Gram matrices (ghost norms; Li et al. 2022,
arXiv:2110.05679), and those between two *different* uses of one parameter are what makes tied weights exact (phantom
clipping; Ding et al. 2024, arXiv:2405.18194, is the case of one output position).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dp.per_example.chosen import Chosen
from hf_dp.per_example.gram import Dense, OneHot, SelfGrams, Side, gram, smallest_block
from hf_dp.per_example.precision import accumulation, full_precision
from hf_dp.per_example.products import (
    BLOCK,
    CUT_BLOCK,
    add_weighted_,
    are_multiplied_as_they_are,
    inner,
    is_instantiated,
    unsure,
)

# Rounding of a squared norm, in units of machine epsilon x (sum over positions of |left| |right|)^2.
_ROUNDING = 8.0
# The longest sums that are left to one reduction: rounding grows with their length.
_NORM_BLOCK = 512


@dataclass(frozen=True)
class Outer:
    """Example i's gradient: `scale` x sum over t of left_i[t] right_i[t]^T, a (left.size, right.size) matrix."""

    left: Side
    right: Side
    scale: float = 1.0

    @property
    def device(self) -> torch.device:
        return self.left.tensor.device

    @property
    def transposed(self) -> Outer:
        return Outer(self.right, self.left, self.scale)

    def scaled(self, scale: float) -> Outer:
        return replace(self, scale=self.scale * scale)

    def rows(self, index: Tensor) -> Outer:
        """The rows `index` (k,) of each gradient."""
        if isinstance(self.left, Dense):
            return replace(self, left=Dense(self.left.values[..., index]))
        chosen = self.left.ids.unsqueeze(2).eq(index)
        dtype = self.right.values.dtype if isinstance(self.right, Dense) else torch.float32
        return replace(self, left=Dense(chosen.to(dtype)))

    def instantiated(self, cut_block: int = CUT_BLOCK) -> PerExample:
        """The (B, left.size, right.size) gradients themselves; `cut_block` as of `inner`."""
        left, right = self.left, self.right
        if isinstance(left, Dense) and isinstance(right, Dense):
            with full_precision(self.device):
                values = inner(left.values.mT, right.values, cut_block)
            return PerExample(values.mul_(self.scale) if self.scale != 1.0 else values)
        if isinstance(left, OneHot) and isinstance(right, Dense):
            rows = accumulation(right.values)
            values = rows.new_zeros(rows.shape[0], left.size, right.size)
            values.scatter_add_(1, left.ids.unsqueeze(2).expand_as(rows), rows)
            return PerExample(values.mul_(self.scale))
        return self.transposed.instantiated(cut_block).transposed

    def settled(self) -> Outer | PerExample:
        """Instantiated where `is_instantiated` says so.

        What tensor cores cut off there is no error of the norm, which is that of the very numbers that are summed.
        """
        left, right = self.left, self.right
        on_cores = are_multiplied_as_they_are(left.tensor, right.tensor)
        width = sum(side.size if isinstance(side, Dense) else 1 for side in (left, right))
        if is_instantiated(left.size * right.size, width, left.tensor.shape[1], on_cores):
            return self.instantiated(BLOCK)
        return self

    def add_weighted_(self, out: Tensor, coefficients: Tensor) -> None:
        """Adds sum over i of coefficients[i] x (gradient of example i) to `out` in place, in the dtype of `out`."""
        left, right = self.left, self.right
        matrix = out.view(left.size, right.size)
        if isinstance(left, Dense) and isinstance(right, Dense):
            add_weighted_(matrix, left.values, right.values, coefficients, self.scale)
        elif isinstance(left, OneHot) and isinstance(right, Dense):
            rows = right.values.to(out.dtype) * (coefficients.to(out.dtype) * self.scale)[:, None, None]
            matrix.index_add_(0, left.ids.flatten(), rows.flatten(0, 1))
        elif isinstance(left, Dense) and isinstance(right, OneHot):
            columns = left.values.to(out.dtype) * (coefficients.to(out.dtype) * self.scale)[:, None, None]
            matrix.index_add_(1, right.ids.flatten(), columns.flatten(0, 1).T)
        else:
            raise TypeError("an outer product of two one-hot sides carries no gradient")

    def accumulated_in(self, dtype: torch.dtype) -> Outer:
        """Itself: an outer product is cast where it is summed."""
        return self

    def selected(self, index: Tensor) -> Outer:
        """The examples in `index` alone."""
        return replace(self, left=self.left.of(self.left.tensor[index]), right=self.right.of(self.right.tensor[index]))

    def masked(self, chosen: Chosen) -> Outer:
        """With zeros, not 0 x NaN, in place of the examples that are not `chosen`."""
        return replace(self, left=self.left.masked(chosen), right=self.right.masked(chosen))


@dataclass(frozen=True)
class DistinctRows(Outer):
    """A dense side beside looked-up ids of which none comes twice in an example: norms need no Gram matrix."""


@dataclass(frozen=True)
class PerExample:
    """Instantiated gradients: `values` (B, *shape of the parameter)."""

    values: Tensor

    @property
    def transposed(self) -> PerExample:
        return PerExample(self.values.mT)

    def rows(self, index: Tensor) -> PerExample:
        """The rows `index` (k,) of each gradient."""
        return PerExample(self.values[:, index])

    def scaled(self, scale: float) -> PerExample:
        return self if scale == 1.0 else PerExample(self.values * scale)

    def add_weighted_(self, out: Tensor, coefficients: Tensor) -> None:
        """Adds sum over i of coefficients[i] x values[i] to `out` in place, in the dtype of `out`."""
        rows = self.values.reshape(self.values.shape[0], -1).to(out.dtype)
        out.view(-1).addmv_(rows.T, coefficients.to(out.dtype))

    def accumulated_in(self, dtype: torch.dtype) -> PerExample:
        """The same with values in `dtype`."""
        return PerExample(self.values.to(dtype))

    def selected(self, index: Tensor) -> PerExample:
        """The examples in `index` alone."""
        return PerExample(self.values[index])

    def masked(self, chosen: Chosen) -> PerExample:
        """The same, of which those that are not `chosen` are left out where it is summed."""
        return OfChosen(self.values, chosen)


@dataclass(frozen=True)
class OfChosen(PerExample):
    """Those of which some are left out: its weighted sum is that of `chosen`, whose coefficients it has."""

    chosen: Chosen

    def add_weighted_(self, out: Tensor, coefficients: Tensor) -> None:
        self.chosen.add_weighted_(out.view(-1), self.in_rows(out.dtype))

    def in_rows(self, dtype: torch.dtype) -> Tensor:
        """The gradients (B, n) in `dtype`."""
        return self.values.reshape(self.values.shape[0], -1).to(dtype)


Factors = Outer | PerExample


def joined(factors: Iterable[list[Factors]]) -> Iterator[list[Factors]]:
    """The uses of each parameter, with those joined to one whose gradients are kept and used once: norms add up."""
    alone: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for uses in factors:
        if len(uses) == 1 and isinstance(uses[0], PerExample):
            rows = accumulation(uses[0].values).reshape(uses[0].values.shape[0], -1)
            # Not copied whole: that would be as many numbers again.
            rows = _shortened(rows) if rows.shape[1] > _NORM_BLOCK else rows
            alone.setdefault((rows.dtype, rows.device), []).append(rows)
        elif uses:
            yield uses
    for together in alone.values():
        yield [PerExample(torch.cat(together, dim=1))]


def squared_norms(uses: list[Factors], grams: SelfGrams | None = None) -> tuple[Tensor, Tensor]:
    """Squared l2 norms of the per-example gradients of one parameter used `len(uses)` times.

    Args:
        uses: the factors of its uses.
        grams: what is known from other parameters of the same recording.

    Returns:
        The squared norms (B,): inner products over all ordered pairs of uses; and a bound (B,) on their rounding
        error, which matters where large terms cancel.
    """
    match uses:
        case [DistinctRows(OneHot(), Dense(values), scale)]:
            norms = abs(scale) * _norms(accumulation(values).flatten(1))
            return norms.square(), _rounding(norms)
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(outers) == len(uses):
        return _gram_norms(outers, grams or SelfGrams())
    return _norms_of_sum(uses, grams or SelfGrams())


def stacked(pairs: list[tuple[Tensor, Tensor]], losses: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of squared norms and of bounds on their rounding, (B,) each, over all parameters; zero of none.

    Args:
        pairs: of each parameter.
        losses: (B,), beside which the sums are to lie.
    """
    pairs = pairs or [(torch.zeros_like(losses), torch.zeros_like(losses))]
    dtype = torch.promote_types(torch.float32, max((p[0].dtype for p in pairs), key=lambda d: d.itemsize))
    total, rounding = (torch.stack([pair[i].to(losses.device, dtype) for pair in pairs]).sum(0) for i in (0, 1))
    return total, rounding


def _gram_norms(outers: list[Outer], grams: SelfGrams) -> tuple[Tensor, Tensor]:
    total = magnitude = underflow = torch.zeros((), device=outers[0].device)
    for position, first in enumerate(outers):
        smallest = smallest_block(first.left, first.right)
        left, right = grams.of(first.left, smallest), grams.of(first.right, smallest)
        total = total + first.scale**2 * left.inner(right)
        length = max(first.left.width, first.right.width) / BLOCK
        times = 1 + length + unsure(first.left.tensor, first.right.tensor) / _ROUNDING
        magnitude = magnitude + times**0.5 * abs(first.scale) * (left.row_norms * right.row_norms).sum(1)
        # Each entry of a Gram matrix may have lost as much as the smallest normal number in each of its products.
        lost = first.left.width * right.row_norms.sum(1).square() + first.right.width * left.row_norms.sum(1).square()
        underflow = underflow + abs(first.scale) * torch.finfo(lost.dtype).tiny ** 0.5 * lost.sqrt()
        for second in outers[position + 1 :]:
            crossed = gram(first.left, second.left) * gram(first.right, second.right)
            total = total + 2 * first.scale * second.scale * crossed.sum((1, 2))
    return total.clamp_min(0), _rounding(magnitude) + underflow.square()


def _norms_of_sum(uses: list[Factors], grams: SelfGrams) -> tuple[Tensor, Tensor]:
    """As of `squared_norms`, where a gradient is instantiated; looked-up rows, which are few of them, are not."""
    looked_up = [use for use in uses if isinstance(use, Outer) and _is_lookup(use)]
    others = [use for use in uses if not (isinstance(use, Outer) and _is_lookup(use))]
    values = [accumulation(use.instantiated().values if isinstance(use, Outer) else use.values) for use in others]
    whole = sum(values[1:], start=values[0])
    for use in looked_up:
        # The bound on rounding is that of the larger type.
        whole = whole.to(torch.promote_types(whole.dtype, use.right.tensor.dtype))
    norms = _norms(whole.reshape(len(whole), -1))
    if len(uses) == 1:
        return norms.square(), _rounding(norms)
    # The weighted sum adds the uses one by one: what cancels between them there leaves its rounding behind.
    apart = [norms] if len(others) == 1 and not isinstance(others[0], Outer) else [_magnitude(use) for use in others]
    rounding = _rounding(torch.stack([*apart, *(_magnitude(use) for use in looked_up)]).sum(0))
    total = norms.square()
    if looked_up:
        squares, bound = _gram_norms(looked_up, grams)
        total, rounding = total + squares, rounding + bound
    for use in looked_up:
        met = whole[torch.arange(len(whole), device=whole.device)[:, None], use.left.tensor]
        total = total + 2 * use.scale * met.mul_(use.right.tensor).sum((1, 2))
    return total.clamp_min(0), rounding


def _is_lookup(use: Outer) -> bool:
    return isinstance(use.left, OneHot) and isinstance(use.right, Dense)


def _magnitude(use: Factors) -> Tensor:
    """(B,): what the norm could be if nothing cancelled between positions."""
    if isinstance(use, PerExample):
        return _norms(accumulation(use.values).reshape(use.values.shape[0], -1))
    times = 1 + unsure(use.left.tensor, use.right.tensor) / _ROUNDING
    return (use.left.row_norms() * use.right.row_norms()).sum(1) * (abs(use.scale) * math.sqrt(times))


def _norms(rows: Tensor) -> Tensor:
    """(B,) l2 norms of rows (B, n), in blocks: one long float32 sum of squares falls short by 0.02 % at n = 10^7."""
    while rows.shape[1] > _NORM_BLOCK:
        rows = _shortened(rows)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def _shortened(rows: Tensor) -> Tensor:
    """Rows of the same norms as `rows` (B, n), with one number for each whole block of theirs."""
    whole = rows.shape[1] // _NORM_BLOCK * _NORM_BLOCK
    blocks: Tensor = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _NORM_BLOCK)), dim=2)
    return torch.cat([blocks, rows[:, whole:]], dim=1) if whole < rows.shape[1] else blocks


def _rounding(magnitude: Tensor) -> Tensor:
    return _ROUNDING * torch.finfo(magnitude.dtype).eps * magnitude.square()
