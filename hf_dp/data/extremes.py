"""Rows of a dataset that show what its rows can be: found from its columns, in one pass over what is numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from hf_dp.data.collate import length_of

# Views of the columns, no copies; rows that are selected out of a table are copied, so many at a time.
_AT_ONCE = 10_000
_NO_LABEL = -100
_Numbers = np.ndarray[Any, np.dtype[Any]]


class Extremes(NamedTuple):
    """Indices of rows.

    Attributes:
        rows: the shortest, the longest, those with the least and the greatest number, and those without one.
        uneven: those among them with the shortest and the longest lists, where there are different lengths; the
            shortest first.
    """

    rows: list[int]
    uneven: list[int]


def extreme_rows(dataset: Any) -> Extremes:
    """Of each column rows with the longest and the shortest list or text; of whole numbers the least and the greatest.

    An id beyond the vocabulary, a label that is no class or is missing, a text without tokens, and one with more tokens
    than positions are among them. Lengths are read from where lists begin, without their values.
    Only a `datasets.Dataset` without a transform knows its columns, and a list its lengths; others, which would be read
    row by row, tell nothing.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}

    def note(name: str, what: str, value: int, row: int) -> None:
        found[name, what] = max(found.get((name, what), (value, row)), (value, row))

    if isinstance(dataset, (list, tuple)) and all(isinstance(row, Mapping) for row in dataset):
        for i, row in enumerate(dataset):
            for name, value in row.items():
                note(name, "longest", length_of(value), i)
                note(name, "shortest", -length_of(value), i)
    elif isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        _note_columns(dataset, note)
    else:
        return Extremes([], [])
    pairs = [
        (best, found[name, what.replace("longest", "shortest")])
        for (name, what), best in found.items()
        if what.startswith("longest")
    ]
    uneven = [(long, short) for (most, long), (least, short) in pairs if most != -least]
    in_order = [short for _, short in uneven] + [long for long, _ in uneven]
    return Extremes(sorted({row for _, row in found.values()}), list(dict.fromkeys(in_order)))


def _note_columns(dataset: Dataset, note: Callable[[str, str, int, int], None]) -> None:
    """Notes what is extreme in each column."""
    table, selected = dataset.data.table, dataset._indices
    # Where a row of the table is in the dataset; a selection, or a shuffled dataset, is a list of rows of its table.
    places = np.arange(len(table))
    if selected is not None:
        places = np.full(len(table), -1)
        places[selected.column(0).to_numpy()] = np.arange(len(dataset))
    for name in dataset.format["columns"]:
        kind = table.schema.field(name).type
        innermost = _innermost(kind)
        if not (pa.types.is_primitive(innermost) or _is_text(innermost)):
            continue
        begin = 0
        for chunk in table.column(name).chunks:
            for start in range(0, len(chunk), _AT_ONCE):
                part = chunk.slice(start, _AT_ONCE)
                rows = places[begin : begin + len(part)]
                begin += len(part)
                if not (rows >= 0).all():
                    part, rows = part.take(np.flatnonzero(rows >= 0)), rows[rows >= 0]
                for what, value, row in _extremes(part):
                    note(name, what, value, int(rows[row]))


def _extremes(column: pa.Array) -> Iterator[tuple[str, int, int]]:
    """What, how much of it, and in which row; the more, the more extreme."""
    if _is_text(column.type):
        yield from _both(("longest", "shortest"), _numbers(pc.binary_length(column)), np.arange(len(column) + 1))
        return
    # Where each row begins among the elements of its lists. Of other numbers than whole ones, lengths are enough.
    starts, depth = np.arange(len(column) + 1), 0
    is_whole = pa.types.is_integer(_innermost(column.type))
    while _is_list(column.type) and (is_whole or depth == 0):
        lengths = _numbers(pc.list_value_length(column))
        yield from _both((f"longest, {depth}", f"shortest, {depth}"), lengths, starts)
        starts, depth = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])[starts], depth + 1
        column = pc.list_flatten(column)
    if not is_whole:
        return
    if column.null_count:
        first = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
        yield "missing", 1, int(np.searchsorted(starts, first, side="right")) - 1
    values = column.drop_null().to_numpy(zero_copy_only=False)
    if column.null_count or (len(values) and values.min() <= _NO_LABEL):
        told = pc.fill_null(pc.not_equal(column, _NO_LABEL), False).to_numpy(zero_copy_only=False)
        starts = np.concatenate([[0], told.cumsum()])[starts]
        values = column.filter(pa.array(told)).to_numpy(zero_copy_only=False)
    yield from _both(("largest", "smallest"), values, starts)


def _both(names: tuple[str, str], values: _Numbers, starts: _Numbers) -> Iterator[tuple[str, int, int]]:
    """The greatest and the least of the rows' values; those of row i are from starts[i] to starts[i + 1]."""
    rows = np.flatnonzero(starts[:-1] < starts[1:])
    if len(rows):
        most = np.maximum.reduceat(values, starts[rows])
        least = np.minimum.reduceat(values, starts[rows])
        yield names[0], int(most.max()), int(rows[most.argmax()])
        yield names[1], -int(least.min()), int(rows[least.argmin()])


def _numbers(lengths: pa.Array) -> _Numbers:
    found: _Numbers = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
    return found


def _innermost(kind: pa.DataType) -> pa.DataType:
    return _innermost(kind.value_type) if _is_list(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
