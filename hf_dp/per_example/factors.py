"""Per-example gradients of one use of one parameter, without instantiating them where that would cost more.

For y = x W^T with x: (B, T, d) and output gradient g: (B, T, p), example i's gradient is the sum over positions of
outer products g_i[t] x_i[t]^T (Goodfellow 2015, arXiv:1510.01799). An embedding lookup is the same with one-hot rows.
`Outer` keeps the pair; its inner products need only two T x T Gram matrices (ghost norms; Li et al. 2022,
arXiv:2110.05679), and those between two *different* uses of one parameter are what makes tied weights exact (phantom
clipping; Ding et al. 2024, arXiv:2405.18194, is the case of one output position).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_dp.per_example.chosen import Chosen
from hf_dp.per_example.doubt import NO_DOUBT, Doubt
from hf_dp.per_example.gram import Dense, OneHot, Side
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.long_sums import AT_ONCE, united, united_where_they_are
from hf_dp.per_example.precision import accumulation, sum_dtype
from hf_dp.per_example.products import (
    BLOCK,
    add_weighted_,
    are_multiplied_as_they_are,
    inner,
    instantiated_from,
)
from hf_dp.per_example.waiting import answers_at_once


@dataclass(frozen=True)
class Outer:
    """Example i's gradient: `scale` x sum over t of left_i[t] right_i[t]^T, a (left.size, right.size) matrix.

    Attributes:
        given: lengths of other rows, which those of the sides are made of.
    """

    left: Side
    right: Side
    scale: float = 1.0
    given: Lengths | None = field(default=None, kw_only=True)

    @property
    def device(self) -> torch.device:
        return self.left.tensor.device

    @property
    def transposed(self) -> Outer:
        return replace(self, left=self.right, right=self.left)

    def lengths(self, left: Tensor | None = None, right: Tensor | None = None, is_kept: bool = False) -> Lengths:
        """Of its rows.

        Args:
            left: (B, T) those of that side, where they are known.
            right: beside it.
            is_kept: whether gradients are instantiated.
        """
        if self.given is not None:
            return self.given
        left = self.left.row_norms() if left is None else left
        right = self.right.row_norms() if right is None else right
        return Lengths(left, right, abs(self.scale), Doubt.of(self.left.tensor, self.right.tensor, is_kept))

    @property
    def doubt(self) -> tuple[Doubt, int]:
        """How its norm is made, and of how many positions."""
        if self.given is not None:
            return self.given.doubt, self.given.left.shape[-1]
        return Doubt.of(self.left.tensor, self.right.tensor), self.left.tensor.shape[1]

    @property
    def likeness(self) -> Hashable:
        """What those have in common whose norms are taken at once."""
        sides = [(side.width, side.tensor.dtype) for side in (self.left, self.right)]
        given = None if self.given is None else self.given.likeness
        return self.device, self.left.tensor.shape[:2], *sides, self.scale, given

    def scaled(self, scale: float) -> Outer:
        given = None if self.given is None else self.given.scaled(scale)
        return replace(self, scale=self.scale * scale, given=given)

    def rows(self, index: Tensor) -> Outer:
        """The rows `index` (k,) of each gradient."""
        if isinstance(self.left, Dense):
            return replace(self, left=Dense(self.left.values[..., index]))
        chosen = self.left.ids.unsqueeze(2).eq(index)
        dtype = self.right.values.dtype if isinstance(self.right, Dense) else torch.float32
        return replace(self, left=Dense(chosen.to(dtype)))

    def instantiated(self, block: int | None = None) -> PerExample:
        """The (B, left.size, right.size) gradients themselves, in `full_precision`; `block` as of `inner`."""
        left, right = self.left, self.right
        if isinstance(left, Dense) and isinstance(right, Dense):
            values = inner(left.values.mT, right.values, block)
            return PerExample(values.mul_(self.scale) if self.scale != 1.0 else values)
        if isinstance(left, OneHot) and isinstance(right, Dense):
            rows = accumulation(right.values)
            values = rows.new_zeros(rows.shape[0], left.size, right.size)
            values.scatter_add_(1, left.ids.unsqueeze(2).expand_as(rows), rows)
            return PerExample(values.mul_(self.scale))
        return self.transposed.instantiated(block).transposed

    def settled(self) -> Outer | PerExample:
        """Instantiated where `is_instantiated` says so, in `full_precision`.

        What tensor cores cut off there is no error of the norm, which is that of the very numbers that are summed.
        """
        left, right = self.left, self.right
        on_cores = are_multiplied_as_they_are(left.tensor, right.tensor)
        width = (left.size if isinstance(left, Dense) else 1) + (right.size if isinstance(right, Dense) else 1)
        fewest = instantiated_from(left.size * right.size, width, on_cores)
        if left.tensor.shape[1] < fewest:
            return self
        # Of what is instantiated beside any others, a GPU would take long to read all rows once more. In 16 bits what
        # an example adds depends on the others by as much in any case.
        lengths = None if on_cores and fewest == 0 else self.lengths(is_kept=True)
        made = self.instantiated(BLOCK)
        return made if lengths is None else replace(made, lengths=lengths)

    def add_weighted_(self, out: Tensor, coefficients: Tensor) -> None:
        """Adds sum over i of coefficients[i] x (gradient of example i) to `out` in place, in the dtype of `out`."""
        left, right = self.left, self.right
        matrix = out.view(left.size, right.size)
        if isinstance(left, Dense) and isinstance(right, Dense):
            add_weighted_(matrix, left.values, right.values, coefficients, self.scale)
        elif isinstance(left, OneHot) and isinstance(right, Dense):
            rows = right.values.to(out.dtype) * (coefficients.to(out.dtype) * self.scale)[:, None, None]
            _add_rows_(matrix, left.ids, rows)
        elif isinstance(left, Dense) and isinstance(right, OneHot):
            columns = left.values.to(out.dtype) * (coefficients.to(out.dtype) * self.scale)[:, None, None]
            _add_rows_(matrix.T, right.ids, columns)
        else:
            raise TypeError("an outer product of two one-hot sides carries no gradient")

    def accumulated_in(self, dtype: torch.dtype) -> Outer:
        """The same with sides of more than 16 bits in `dtype`: norms are of what is summed."""
        left, right = self.left.accumulated_in(dtype), self.right.accumulated_in(dtype)
        if left is self.left and right is self.right:
            return self
        return replace(self, left=left, right=right, given=None if self.given is None else self.given.to(dtype))

    def in_float64(self) -> Outer:
        """The same of longer numbers."""
        return replace(self, left=self.left.in_float64(), right=self.right.in_float64())

    def selected(self, index: Tensor) -> Outer:
        """The examples in `index` alone."""
        left, right = (side.of(side.tensor[index]) for side in (self.left, self.right))
        return replace(self, left=left, right=right, given=None if self.given is None else self.given.selected(index))

    def masked(self, chosen: Chosen) -> Outer:
        """With zeros, not 0 x NaN, in place of the examples that are not `chosen`."""
        return replace(self, left=self.left.masked(chosen), right=self.right.masked(chosen))


def _add_rows_(matrix: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds `rows` (B, T, n) to those of `matrix` that `ids` (B, T) names.

    One by one, each would be rounded to the sum over the whole logical batch, thousands of times.
    """
    ids, rows = ids.flatten(), rows.flatten(0, 1)
    if answers_at_once(matrix.device):
        ids, rows = united(ids, rows)
    elif len(ids):
        rows = united_where_they_are(ids, rows)
    matrix.index_add_(0, ids, rows)


@dataclass(frozen=True)
class DistinctRows(Outer):
    """A dense side beside looked-up ids of which none comes twice in an example: norms need no Gram matrix.

    Attributes:
        touched: (B, T) whether some position had a gradient in that row, which may cancel; None: where it is not zero.
    """

    touched: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class PerExample:
    """Instantiated gradients: `values` (B, *shape of the parameter).

    Attributes:
        lengths: of what they are sums over; None where they are no sums, or that is not known.
    """

    values: Tensor
    lengths: Lengths | None = field(default=None, kw_only=True)

    @classmethod
    def over(cls, positions: Tensor) -> PerExample:
        """Sums over the positions of (B, T, n)."""
        # Of 16 bits a GPU makes no copy for it.
        dtype = sum_dtype(positions.dtype)
        lengths = Lengths(torch.linalg.vector_norm(positions, dim=2, dtype=dtype))
        return cls(positions.sum(1, dtype=dtype), lengths=lengths)

    @property
    def doubt(self) -> tuple[Doubt, int]:
        """As of `Outer`."""
        return (NO_DOUBT, 1) if self.lengths is None else (self.lengths.doubt, self.lengths.left.shape[-1])

    @property
    def transposed(self) -> PerExample:
        return replace(self, values=self.values.mT)

    def rows(self, index: Tensor) -> PerExample:
        """The rows `index` (k,) of each gradient."""
        return replace(self, values=self.values[:, index])

    def scaled(self, scale: float) -> PerExample:
        if scale == 1.0:
            return self
        return PerExample(self.values * scale, lengths=None if self.lengths is None else self.lengths.scaled(scale))

    def add_weighted_(self, out: Tensor, coefficients: Tensor) -> None:
        """Adds sum over i of coefficients[i] x values[i] to `out` in place, in the dtype of `out`."""
        rows, weights = self.values.reshape(len(self.values), -1).to(out.dtype), coefficients.to(out.dtype)
        if len(rows) <= AT_ONCE:
            out.view(-1).addmv_(rows.T, weights)
            return
        # A product with a vector adds them one by one, each rounded to the whole.
        parts = [few.T @ own for few, own in zip(rows.split(AT_ONCE), weights.split(AT_ONCE), strict=True)]
        out.view(-1).add_(torch.stack(parts).sum(0, dtype=torch.float64).to(out.dtype))

    def accumulated_in(self, dtype: torch.dtype) -> PerExample:
        """The same with values in `dtype`."""
        if self.values.dtype == dtype:
            return self
        fewer = self.lengths is not None and torch.finfo(dtype).eps > torch.finfo(self.lengths.left.dtype).eps
        lengths = self.lengths.to(dtype) if self.lengths is not None and fewer else self.lengths
        return replace(self, values=self.values.to(dtype), lengths=lengths)

    def in_float64(self) -> PerExample:
        """The same in longer numbers."""
        return replace(self, values=self.values.double())

    def selected(self, index: Tensor) -> PerExample:
        """The examples in `index` alone."""
        lengths = None if self.lengths is None else self.lengths.selected(index)
        return PerExample(self.values[index], lengths=lengths)

    def masked(self, chosen: Chosen) -> PerExample:
        """The same, of which those that are not `chosen` are left out where it is summed."""
        return OfChosen(self.values, chosen, lengths=self.lengths)


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
