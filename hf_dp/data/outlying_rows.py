"""Rows that hold what stands out among broken numbers: the least, the greatest, and none (NaN).

What few rows lack is mostly written so: as NaN, or as a number beyond all others (-999).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

# So many rows are looked at, and so many numbers of a column of a table.
_ROWS, _NUMBERS = 100_000, 5_000_000
_MISSING = "missing"


class _Found:
    """What stands out in each column, and where; and how large its numbers are on average."""

    def __init__(self) -> None:
        self.places: dict[tuple[Hashable, str], tuple[float, int]] = {}
        self.sums: dict[Hashable, float] = {}
        self.counts: dict[Hashable, int] = {}

    def rows(self) -> list[int]:
        """Those of what is missing first, then by how much larger than others in their column their numbers are."""
        scores: dict[int, float] = {}
        for (name, what), (size, row) in self.places.items():
            mean = self.sums.get(name, 0.0) / max(1, self.counts.get(name, 0))
            score = math.inf if what == _MISSING else abs(size) / max(mean, math.ulp(0.0))
            scores[row] = max(score, scores.get(row, 0.0))
        return sorted(scores, key=lambda row: (-scores[row], row))


def outlying_rows(dataset: Any) -> list[int]:
    """Indices of rows of a list of dicts, or a `datasets.Dataset` without a transform, those that stand out the most
    first; none of others, which tell nothing."""
    found = _Found()
    if isinstance(dataset, (list, tuple)):
        for i, row in enumerate(islice(dataset, _ROWS)):
            for name, value in row.items() if isinstance(row, Mapping) else ():
                _note(found, name, _broken(value), lambda place, row=i: row)  # type: ignore[misc]
    elif isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        for name, numbers, rows in _columns(dataset):
            _note(found, name, numbers, lambda place, rows=rows: int(rows[place]))  # type: ignore[misc]
    return found.rows()


def _note(found: _Found, name: Hashable, numbers: np.ndarray[Any, Any] | None, row_of: Callable[[int], int]) -> None:
    if numbers is None or not numbers.size:
        return
    missing = np.isnan(numbers)
    if missing.any():
        found.places.setdefault((name, _MISSING), (0.0, row_of(int(missing.argmax()))))
    if missing.all():
        return
    finite = np.abs(numbers[np.isfinite(numbers)])
    found.sums[name] = found.sums.get(name, 0.0) + float(finite.sum())
    found.counts[name] = found.counts.get(name, 0) + finite.size
    for what, place, sign in (("least", np.nanargmin(numbers), -1), ("greatest", np.nanargmax(numbers), 1)):
        size = sign * float(numbers[place])
        if (name, what) not in found.places or size > found.places[name, what][0]:
            found.places[name, what] = size, row_of(int(place))


def _broken(value: Any) -> np.ndarray[Any, Any] | None:
    """(n,) of a number, a list, an array or a tensor of broken numbers; None of anything else."""
    several = value if isinstance(value, (list, tuple)) else [value]
    first = next((one for one in several if one is not None), value)
    if not isinstance(first, (float, list, tuple)) and "float" not in str(getattr(first, "dtype", "")):
        return None
    try:
        return np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError):  # of unequal lengths, or texts
        return None


def _columns(dataset: Dataset) -> Iterator[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Name, numbers and the row of each of the dataset's columns of broken numbers."""
    some = dataset.select(range(min(len(dataset), _ROWS))).with_format("arrow")
    for name in dataset.column_names:
        kind = dataset.data.table.schema.field(name).type
        if not pa.types.is_floating(_innermost(kind)):
            continue
        begin, seen = 0, 0
        for table in some.select_columns([name]).iter(10_000):
            column, rows = table.column(name).combine_chunks(), np.arange(begin, begin + len(table))
            begin += len(table)
            while not pa.types.is_floating(column.type):
                if isinstance(column, pa.ExtensionArray):
                    column = column.storage
                elif pa.types.is_fixed_size_list(column.type):
                    rows = np.repeat(rows[column.is_valid().to_numpy(zero_copy_only=False)], column.type.list_size)
                    column = column.flatten()
                else:
                    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
                    rows, column = np.repeat(rows, lengths), column.flatten()
            yield name, column.to_numpy(zero_copy_only=False).astype(np.float64), rows
            if (seen := seen + len(rows)) > _NUMBERS:
                break


def _innermost(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _innermost(kind.storage_type)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return _innermost(kind.value_type) if is_list else kind
