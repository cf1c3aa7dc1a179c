"""A few rows of a dataset that show what its rows can be, for the check before the first step."""

from __future__ import annotations

from typing import Any

from hf_dp.sampling import length

_ROWS = 32
_ROWS_FOR_LENGTHS = 1000
_KEPT = 5


def telling_rows(dataset: Any) -> list[Any]:
    """About five rows from all over `dataset`, of different lengths if a thousand rows show any.

    Only rows of different lengths show whether padding leaks from one into another, and data that is sorted or put
    together from parts often begins with many of one length.
    """
    n = len(dataset)
    rows = [dataset[i] for i in _spread(n, _ROWS)]
    if len({length(row) for row in rows}) == 1 and length(rows[0]):
        common = length(rows[0])
        others = (dataset[i] for i in _spread(n, _ROWS_FOR_LENGTHS))
        rows += next(([row] for row in others if length(row) != common), [])
    rows.sort(key=length)
    middle = rows[:: max(1, len(rows) // _KEPT)]
    return middle if length(middle[-1]) == length(rows[-1]) else [*middle, rows[-1]]


def _spread(n: int, count: int) -> list[int]:
    return list(range(n)) if n <= count else [i * (n - 1) // (count - 1) for i in range(count)]
