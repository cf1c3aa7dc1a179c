"""Units in micro-batches: each whole in one where it fits, else alone in several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Owners(NamedTuple):
    """Whose each row of a micro-batch is.

    Attributes:
        units: for each row the number of its unit, counted from 0 there.
        before: of the rows of a single unit, how many lie in micro-batches before this one.
        after: in micro-batches after it.
    """

    units: list[int]
    before: int = 0
    after: int = 0


class Size(NamedTuple):
    """Of one unit, or of several that share a micro-batch: how many rows, and how long the longest of them."""

    rows: int
    width: int = 0

    def __or__(self, other: Size) -> Size:
        return Size(self.rows + other.rows, max(self.width, other.width))


def packed(sizes: Sequence[Size], fits: Callable[[Size], bool]) -> list[range]:
    """Which units, of ascending sizes, go together, one after another: as many as fit; one that does not, alone.

    Units of one size lie together, so that few positions are missing where they are computed as one.
    """
    parts: list[range] = []
    filled = Size(0)
    for place, size in enumerate(sizes):
        if parts and fits(filled | size):
            parts[-1], filled = range(parts[-1].start, place + 1), filled | size
        else:
            parts.append(range(place, place + 1))
            filled = size
    return parts
