"""Sums over thousands of examples in float32, of which no addition is rounded to the whole.

Added one by one, each of B terms is rounded to a sum that is up to B times as large: one example more decides to which
side, and the sums of neighbours may be further apart than it is long. So few are added up at a time, and what rounding
takes away from the total is the beginning of the next few (TwoSum: Knuth, The Art of Computer Programming 2, section
4.2.2, theorem B). Of rows of a table that many positions look up those of a micro-batch are added up in float64 first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# So many examples are added up in float32 as they are: of n, numbers that were made for it move neighbours apart by
# n^2 2^-26 C, a thousandth (tests/per_example/test_long_sums.py).
FEW = 256
# Of more, so many at a time.
AT_ONCE = 64
# Numbers of a buffer that are worked on at a time: a few MiB, for the cache of a CPU, and elsewhere few starts.
_CHUNK, _CHUNK_ELSEWHERE = 1 << 18, 1 << 26
# And of rows that are added up in float64.
_IN_FLOAT64 = 1 << 24


class LongSums:
    """Totals of buffers that examples are added to.

    They take as much memory as the buffers, and none as long as there are few examples.

    Args:
        buffers: one-dimensional, or contiguous.
        ranks: on how many examples are added that come into these buffers.
    """

    def __init__(self, buffers: Sequence[Tensor], ranks: int = 1) -> None:
        self._ranks = ranks
        self._buffers, self._totals = [buffer.view(-1) for buffer in buffers], list[Tensor]()
        self._since = 0

    def added(self, examples: int) -> None:
        """So many were added to the buffers by this rank, and by each other that adds to them about as many."""
        self._since += examples * self._ranks
        if self._since > (AT_ONCE if self._totals else FEW):
            self._totals = self._totals or [torch.zeros_like(buffer) for buffer in self._buffers]
            for total, buffer in zip(self._totals, self._buffers, strict=True):
                size = _CHUNK if buffer.device.type == "cpu" else _CHUNK_ELSEWHERE
                for whole, part in zip(total.split(size), buffer.split(size), strict=True):
                    _carry(whole, part)
            self._since = 0

    def settle(self) -> None:
        """Makes the buffers the sums of all that was added."""
        for total, buffer in zip(self._totals, self._buffers, strict=True) if self._totals else ():
            buffer.add_(total)
        self._totals = []


def _carry(total: Tensor, part: Tensor) -> None:
    """Adds `part` to `total` in place; what rounding took away is in `part` then."""
    whole = total + part
    added = whole - total
    lost = total.sub_(whole - added)
    part.sub_(added).add_(lost)
    total.copy_(whole)


def united(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The ids (k,) that are in `ids` (n,), ascending, and for each the sum (k, d) of its `rows` (n, d), made in float64
    and rounded once."""
    found, places = ids.unique(return_inverse=True)
    return found, _summed(rows, places, len(found))


def united_where_they_are(ids: Tensor, rows: Tensor) -> Tensor:
    """The same sums (n, d), each where its id is first, and zeros where this is once more: nothing is waited for."""
    order = ids.argsort(stable=True)
    ordered = ids[order]
    begins = torch.arange(len(ids), device=ids.device)
    begins[1:] *= ordered[1:] != ordered[:-1]
    firsts = torch.empty_like(order).scatter_(0, order, order[begins.cummax(0).values])
    return _summed(rows, firsts, len(ids))


def _summed(rows: Tensor, places: Tensor, number: int) -> Tensor:
    """(number, d): the `rows` (n, d) of each place, added up in float64."""
    sums = rows.new_empty(number, rows.shape[1])
    step = max(1, _IN_FLOAT64 // max(1, len(rows), number))
    for out, few in zip(sums.split(step, 1), rows.split(step, 1), strict=True):
        exact = few.new_zeros(number, few.shape[1], dtype=torch.float64)
        out.copy_(exact.index_add_(0, places, few.double()))
    return sums
