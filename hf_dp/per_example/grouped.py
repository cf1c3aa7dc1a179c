"""Rows of a micro-batch that are one example together: its gradient is the sum of theirs.

Rows of one example are more positions of it: a side (B, T, n) becomes (U, r T, n) for examples of at most r rows, where
positions that are missing add nothing. So norms and sums come from the same factors, cross terms between rows included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.ieee import full_precision
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.routed import Routed


@dataclass(frozen=True)
class LookedUp(Outer):
    """Looked-up rows of examples that are several rows each; their lengths are those of what is left of them when they
    are asked for, where some rows of the table are not trained.

    Attributes:
        counts: (U,) of how many rows each example is made.
        most: r, for how many there is room.
    """

    counts: Tensor = field(kw_only=True)
    most: int = field(kw_only=True)

    def lengths(self, left: Tensor | None = None, right: Tensor | None = None, is_kept: bool = False) -> Lengths:
        """Of each row of an example by itself, summed."""
        own = super().lengths(left, right, is_kept)
        assert own.right is not None
        one, other = (side.unflatten(-1, (self.most, -1)) for side in (own.left, own.right))
        each = replace(own, left=one, right=other)
        return _of_examples(each.magnitude().sum(-1), each, self.counts)

    @property
    def likeness(self) -> Hashable:
        """As of others of its kind."""
        return type(self), super().likeness

    def selected(self, index: Tensor) -> Outer:
        """The examples in `index` alone."""
        found = super().selected(index)
        return replace(self, left=found.left, right=found.right, counts=self.counts[index])


def _of_examples(magnitude: Tensor, rows: Lengths, counts: Tensor) -> Lengths:
    """(U, 1) from `magnitude` (U,), the sum over the rows of each example."""
    if any(rows.doubt.on_cores):
        # What is cut off long sums grows with their length, of which one row has a part.
        magnitude = magnitude * _at(magnitude, counts).sqrt()
    return Lengths(magnitude[:, None])


class Grouping:
    """Which rows of a micro-batch are one example.

    Args:
        owners: for each of B rows the number of its example, from 0 to U - 1; each example has a row.
        factors: of all uses that will be grouped. Layers that read the same input share what is made of it.

    Attributes:
        size: U.
        is_view: whether no row has to be moved, as where all examples have as many, one after another.
    """

    def __init__(self, owners: Sequence[int], factors: Iterable[Factors] = ()) -> None:
        rows = Counter(owners)
        self.size, self._most = len(rows), max(rows.values(), default=0)
        if set(rows) != set(range(self.size)):
            raise ValueError(f"the examples of {len(owners)} rows are not numbered from 0: {sorted(rows)[:10]}")
        self._rows = torch.tensor([rows[owner] for owner in range(self.size)], dtype=torch.float32)
        self.is_view = list(owners) == [row // self._most for row in range(self.size * self._most)]
        self._owners = torch.tensor(owners, dtype=torch.int64)
        seen: Counter[int] = Counter()
        self._places = torch.empty_like(self._owners)
        for row, owner in enumerate(owners):
            self._places[row] = owner * self._most + seen[owner]
            seen[owner] += 1
        sides = [side for one in factors if isinstance(one, Outer) for side in (one.left, one.right)]
        self._to_come = Counter(_key(side.tensor) for side in sides)
        self._known: dict[Any, Tensor] = {}

    def of(self, factors: Factors) -> Factors:
        """The gradients of one use, (U, ...) from (B, ...)."""
        if isinstance(factors, PerExample):
            lengths = None if factors.lengths is None else self._of_rows(factors.lengths)
            return PerExample(self.summed(factors.values), lengths=lengths)
        if self.is_view and self._most == 1:
            return factors
        left, right = (side.of(self._joined(side.tensor)) for side in (factors.left, factors.right))
        if isinstance(factors, Routed):
            return replace(factors, left=left, right=right, ids=self._joined(factors.ids))
        if not (isinstance(left, Dense) and isinstance(right, Dense)):
            return LookedUp(left, right, factors.scale, counts=_at(right.tensor, self._rows), most=self._most)
        joined = Outer(left, right, factors.scale, given=self._of_rows(factors.lengths()))
        # The longer an example is, the sooner its factors are larger than its gradient.
        with full_precision(joined.device):
            return joined.settled()

    def summed(self, values: Tensor) -> Tensor:
        """(U, ...): the sums over the rows (B, ...) of each example."""
        if self.is_view:
            return values.unflatten(0, (self.size, self._most)).sum(1) if self._most > 1 else values
        return values.new_zeros(self.size, *values.shape[1:]).index_add_(0, _at(values, self._owners), values)

    def _of_rows(self, lengths: Lengths) -> Lengths:
        """Of each example that of its rows, by themselves: between them there is padding."""
        if self.is_view and self._most == 1:
            return lengths
        return _of_examples(self.summed(lengths.magnitude()), lengths, self._rows)

    def _joined(self, tensor: Tensor) -> Tensor:
        """(U, r T, ...) from (B, T, ...). Missing positions are zero, as ids and as numbers: on a dense side beside
        looked-up ids a zero is what adds nothing."""
        shape = self.size, self._most * tensor.shape[1], *tensor.shape[2:]
        if self.is_view:
            return tensor.reshape(shape)
        key = _key(tensor)
        if key not in self._known:
            places = tensor.new_zeros(self.size * self._most, *tensor.shape[1:])
            self._known[key] = places.index_copy_(0, _at(tensor, self._places), tensor).view(shape)
        # Kept no longer than the rows that it was made of, whose memory would then be another's.
        self._to_come[key] -= 1
        return self._known[key] if self._to_come[key] > 0 else self._known.pop(key)


def _at(tensor: Tensor, index: Tensor) -> Tensor:
    """`index` where `tensor` lies; nobody waits until it is there."""
    return index.to(tensor.device, non_blocking=True)


def _key(tensor: Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
