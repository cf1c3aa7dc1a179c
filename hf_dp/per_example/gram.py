"""The two sides of an outer product, and the inner products between the rows of sides (Gram matrices)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.chosen import Chosen
from hf_dp.per_example.precision import accumulation, sum_dtype
from hf_dp.per_example.products import SHORT_BLOCK, are_multiplied_as_they_are, inner
from hf_dp.per_example.waiting import answers_at_once

# Gram matrices are split, to compute half of what is symmetric, down to so many positions.
SMALLEST_BLOCK = 32
# The same on tensor cores, where it takes longer to read rows once more than to compute with them.
SMALLEST_ON_CORES = 256


@dataclass(frozen=True)
class Dense:
    """One side of an outer product: `values` (B, T, n)."""

    values: Tensor

    @property
    def size(self) -> int:
        return int(self.values.shape[2])

    @property
    def tensor(self) -> Tensor:
        """What is kept of it."""
        return self.values

    @property
    def width(self) -> int:
        """Numbers added up in an inner product of two rows."""
        return self.size

    def of(self, values: Tensor) -> Dense:
        """The same with other rows."""
        return Dense(values)

    def accumulated_in(self, dtype: torch.dtype) -> Dense:
        """The same in `dtype`, unless it is of 16 bits, which are multiplied as they are."""
        return self if self.values.dtype.itemsize < 4 or self.values.dtype == dtype else Dense(self.values.to(dtype))

    def in_float64(self) -> Dense:
        """The same in longer numbers."""
        return Dense(self.values.double())

    def masked(self, chosen: Chosen) -> Dense:
        """With zeros in place of the examples that are not `chosen`."""
        return Dense(chosen.or_zeros(self.values))

    def padded(self, positions: int) -> Tensor:
        """`values` with so many more positions that add nothing."""
        return F.pad(self.values, (0, 0, 0, positions)) if positions else self.values

    def parts(self) -> Iterator[Dense]:
        """The same, with so few features at once that a processor's cache holds those of all rows."""
        if not answers_at_once(self.values.device):
            return iter([self])
        return (Dense(accumulation(few)) for few in self.values.split(SHORT_BLOCK, 2))

    def row_norms(self) -> Tensor:
        """(B, T) l2 norms of the rows."""
        norms: Tensor = torch.linalg.vector_norm(self.values, dim=2, dtype=sum_dtype(self.values.dtype))
        return norms


@dataclass(frozen=True)
class OneHot:
    """One side whose row t is the unit vector of `ids`[b, t]; `ids` (B, T), `size` n."""

    ids: Tensor
    size: int

    @property
    def tensor(self) -> Tensor:
        """What is kept of it."""
        return self.ids

    @property
    def width(self) -> int:
        """Numbers added up in an inner product of two rows: none, ids are compared."""
        return 0

    def of(self, ids: Tensor) -> OneHot:
        """The same with other rows."""
        return OneHot(ids, self.size)

    def accumulated_in(self, dtype: torch.dtype) -> OneHot:
        """Itself."""
        return self

    def in_float64(self) -> OneHot:
        """Itself."""
        return self

    def masked(self, chosen: Chosen) -> OneHot:
        """Itself: beside a dense side that is zero an id adds nothing."""
        return self

    def padded(self, positions: int) -> Tensor:
        """`ids` with so many more positions that add nothing beside a dense side."""
        return F.pad(self.ids, (0, positions), value=-1) if positions else self.ids

    def parts(self) -> Iterator[OneHot]:
        """Itself."""
        return iter([self])

    def row_norms(self) -> Tensor:
        """(B, T) l2 norms of the rows."""
        return self.ids.ge(0).float()


Side = Dense | OneHot


@dataclass(frozen=True)
class SelfGram:
    """The Gram matrix (B, T, T) of the rows of one side, of which only one triangle of blocks is computed.

    Attributes:
        blocks: each (k B, m, m'), the k blocks of an example one after another; those on the diagonal come first.
        row_norms: (B, T).
    """

    blocks: tuple[Tensor, ...]
    row_norms: Tensor

    def inner(self, other: SelfGram) -> Tensor:
        """(B,): the sum over all pairs of positions of the products of two such matrices' entries."""
        batch = len(self.row_norms)
        diagonal, *rest = ((x * y).reshape(batch, -1).sum(1) for x, y in zip(self.blocks, other.blocks, strict=True))
        return diagonal + 2 * sum(rest)


class SelfGrams:
    """The Gram matrices of one recording; layers that read the same input share its matrix."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Side, SelfGram]] = {}

    def of(self, side: Side, smallest: int = SMALLEST_BLOCK) -> SelfGram:
        """The Gram matrix of `side`, split down to `smallest` positions."""
        tensor = side.tensor
        # The side is kept, so that its memory cannot become another tensor's.
        key = (smallest, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._known:
            self._known[key] = side, _self_gram(side, smallest)
        return self._known[key][1]


def smallest_block(*sides: Side) -> int:
    """Down to how many positions the Gram matrices of sides are split whose entries are multiplied."""
    dense = [side.values for side in sides if isinstance(side, Dense)]
    return SMALLEST_ON_CORES if all(map(are_multiplied_as_they_are, dense, dense)) else SMALLEST_BLOCK


def gram(first: Side, second: Side, known: Tensor | None = None) -> Tensor:
    """Inner products (B, T, S) of the rows of two sides, in at least float32.

    Args:
        first: (B, T).
        second: (B, S).
        known: of other features of two dense sides: what is added to, in place.
    """
    if isinstance(first, Dense) and isinstance(second, Dense):
        return inner(first.values, second.values.mT, known=known)
    if isinstance(first, OneHot) and isinstance(second, OneHot):
        return first.ids.unsqueeze(2).eq(second.ids.unsqueeze(1))
    if isinstance(first, Dense) and isinstance(second, OneHot):
        index = second.ids.unsqueeze(1).expand(-1, first.values.shape[1], -1)
        return accumulation(first.values.gather(2, index))
    return gram(second, first).mT


def _self_gram(side: Side, smallest: int) -> SelfGram:
    positions = length = side.tensor.shape[1]
    halvings = 0
    while length >= 2 * smallest:
        length, halvings = (length + 1) // 2, halvings + 1
    whole = length << halvings
    blocks: Sequence[Tensor | None] = [None] * (halvings + 1)
    for part in side.parts():
        pairs = _pairs(part.of(part.padded(whole - positions)), halvings)
        blocks = [gram(*pair, known) for pair, known in zip(pairs, blocks, strict=True)]
    made = tuple(block for block in blocks if block is not None)
    squares = made[0].diagonal(dim1=1, dim2=2).reshape(len(side.tensor), whole)[:, :positions]
    return SelfGram(made, squares.sqrt() if isinstance(side, Dense) else side.row_norms())


def _pairs(part: Side, halvings: int) -> list[tuple[Side, Side]]:
    """Each block's sides, of which the lengths are whole after so many halvings; the diagonal's come first."""
    rest = list[tuple[Side, Side]]()
    for _ in range(halvings):
        halves = part.tensor.unflatten(1, (2, -1))
        rest.append((part.of(halves[:, 0]), part.of(halves[:, 1])))
        part = part.of(halves.flatten(0, 1))
    return [(part, part), *rest]
