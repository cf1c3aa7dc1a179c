"""Units in micro-batches: each whole, in one."""

from __future__ import annotations

from collections.abc import Iterable


def packed(sizes: Iterable[int], most: int) -> list[range]:
    """Which of ascending `sizes` go together, one after another, with at most `most` in all: as many as go.

    Units of one size lie together, so that few positions are missing where they are computed as one.
    """
    parts: list[range] = []
    start = filled = place = 0
    for place, size in enumerate(sizes):
        if place > start and filled + size > most:
            parts.append(range(start, place))
            start, filled = place, 0
        filled += size
    return [*parts, range(start, place + 1)] if filled else parts
