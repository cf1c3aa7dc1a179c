"""Rows of a dataset that show what its rows can be: found from its columns, in one pass over what is numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from hf_dp.data.lengths import length, length_of

# Views of the columns, no copies; rows that are selected out of a table are copied, so many at a time.
_AT_ONCE = 10_000
_NO_LABEL = -100
_Numbers = np.ndarray[Any, np.dtype[Any]]
_PLAIN = {int, float, bool, str, bytes, type(None)}
# Of which column, or of how many more elements one has than another; what; how much of it; in which row, and how long
# that is: where rows have as much the shortest tells as much in less time.
_Note = Callable[[Hashable, str, int, int, int], None]


class Extremes(NamedTuple):
    """Indices of rows.

    Attributes:
        rows: the shortest, the longest, those with the least and the greatest number, those without one, and of rows in
            a list one of each kind.
        uneven: those among them with the shortest and the longest lists, where there are different lengths; the
            shortest first.
    """

    rows: list[int]
    uneven: list[int]


def extreme_rows(dataset: Any) -> Extremes:
    """Of each column rows with the longest and the shortest list or text; of whole numbers the least and the greatest.

    An id beyond the vocabulary, a label that is no class or is missing, more labels than ids, a text without tokens,
    and one with more tokens than positions are among them. Lengths are read from where lists begin, without their
    values.
    Only a `datasets.Dataset` without a transform knows its columns, and a list its rows; others, which would be read
    row by row, tell nothing.
    """
    found: dict[tuple[Hashable, str], tuple[int, int, int]] = {}

    def note(name: Hashable, what: str, value: int, row: int, size: int) -> None:
        told = value, -size, row
        found[name, what] = max(found.get((name, what), told), told)

    if isinstance(dataset, (list, tuple)) and all(isinstance(row, Mapping) for row in dataset):
        for i, row in enumerate(dataset):
            _note_row(row, functools.partial(_in_row, note, i, length(row)))
    elif isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        _note_columns(dataset, note)
    else:
        return Extremes([], [])
    pairs = [
        (best, found[name, what.replace("longest", "shortest")])
        for (name, what), best in found.items()
        if what.startswith("longest")
    ]
    uneven = [(long, short) for (most, _, long), (least, _, short) in pairs if most != -least]
    in_order = [short for _, short in uneven] + [long for long, _ in uneven]
    return Extremes(sorted({row for _, _, row in found.values()}), list(dict.fromkeys(in_order)))


def empty_rows(dataset: Any, column: str) -> int | None:
    """How many rows have nothing in a column of lists or texts; None where that is not known soon."""
    if isinstance(dataset, (list, tuple)):
        return sum(isinstance(row, Mapping) and column in row and not length_of(row[column]) for row in dataset)
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom" or column not in dataset.column_names:
        return None
    kind = dataset.data.table.schema.field(column).type
    lengths = pc.binary_length if _is_text(kind) else pc.list_value_length if _is_list(kind) else None
    if lengths is None:
        return None
    some = dataset.select_columns([column]).with_format("arrow").iter(_AT_ONCE)
    return sum(int((_numbers(lengths(table.column(column))) == 0).sum()) for table in some)


def _in_row(note: _Note, row: int, size: int, name: Hashable, what: str, value: int = 0) -> None:
    note(name, what, value, row, size)


def _note_row(row: Mapping[Any, Any], note: Callable[..., None]) -> None:
    """Notes a row of a list, which holds whatever it holds: what is unlike all others is a kind of its own."""
    before: tuple[Any, int] | None = None
    note(frozenset(row), "kind")
    for name, value in row.items():
        size = length_of(value)
        note(name, "longest", size)
        note(name, "shortest", -size)
        _note_values(name, 0, (value,), note)
        if not isinstance(value, (str, bytes)) and hasattr(value, "__len__"):
            if before is not None and (more := size - before[1]):
                note((before[0], name), "more", more)
                note((before[0], name), "fewer", -more)
            before = name, size


def _note_values(name: Any, depth: int, values: list[Any] | tuple[Any, ...], note: Callable[..., None]) -> None:
    types = set(map(type, values))
    for kind in types:
        note((name, depth, kind), "kind")
    whole = values if types == {int} else [value for value in values if type(value) is int]
    if whole and min(whole) <= _NO_LABEL:
        whole = [value for value in whole if value != _NO_LABEL]
    if whole:
        note(name, "largest", max(whole))
        note(name, "smallest", -min(whole))
    if types <= _PLAIN:
        return
    for value in values:
        if isinstance(value, (list, tuple)):
            _note_values(name, depth + 1, value, note)
        elif hasattr(value, "dtype"):  # an array, a tensor, or one number of these
            note((name, depth, str(value.dtype), len(value.shape)), "kind")
            flat = value.reshape(-1)
            if "int" in str(value.dtype) and len(flat := flat[flat != _NO_LABEL] if flat.min() < 0 else flat):
                note(name, "largest", int(flat.max()))
                note(name, "smallest", -int(flat.min()))


def _note_columns(dataset: Dataset, note: _Note) -> None:
    """Notes what is extreme in each column."""
    table, selected = dataset.data.table, dataset._indices
    # Where a row of the table is in the dataset; a selection, or a shuffled dataset, is a list of rows of its table.
    places = np.arange(len(table))
    if selected is not None:
        places = np.full(len(table), -1)
        places[selected.column(0).to_numpy()] = np.arange(len(dataset))
    before: tuple[str, _Numbers] | None = None
    for name in dataset.format["columns"]:
        begin = 0
        for chunk in table.column(name).chunks:
            for start in range(0, len(chunk), _AT_ONCE):
                part = chunk.slice(start, _AT_ONCE)
                rows = places[begin : begin + len(part)]
                begin += len(part)
                if not (rows >= 0).all():
                    part, rows = part.take(np.flatnonzero(rows >= 0)), rows[rows >= 0]
                for what, value, row, size in _extremes(part):
                    note(name, what, value, int(rows[row]), size)
        if _is_list(table.schema.field(name).type):
            lengths = _numbers(pc.list_value_length(table.column(name)))[places >= 0]
            if before is not None and (more := lengths - before[1]).any():
                kept = places[places >= 0]
                note((before[0], name), "more", int(more.max()), int(kept[more.argmax()]), 0)
                note((before[0], name), "fewer", -int(more.min()), int(kept[more.argmin()]), 0)
            before = name, lengths


def _extremes(column: pa.Array) -> Iterator[tuple[str, int, int, int]]:
    """What, how much of it, in which row, and how long that is; the more, the more extreme."""
    if _is_text(column.type):
        yield from _both(("longest", "shortest"), _numbers(pc.binary_length(column)), np.arange(len(column) + 1))
    # Where each row begins among the elements of its lists. Of other numbers than whole ones, lengths are enough.
    starts, depth = np.arange(len(column) + 1), 0
    innermost = _innermost(column.type)
    is_whole, is_known = pa.types.is_integer(innermost), pa.types.is_primitive(innermost) or _is_text(innermost)
    yield from _missing(column, depth, starts)
    while _is_list(column.type):
        lengths = _numbers(pc.list_value_length(column))
        if is_whole or (is_known and depth == 0):
            yield from _both((f"longest, {depth}", f"shortest, {depth}"), lengths, starts)
        starts, depth = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])[starts], depth + 1
        column = pc.list_flatten(column)
        yield from _missing(column, depth, starts)
    if not is_whole:
        return
    values = _numbers(column)
    if column.null_count or (len(values) and values.min() <= _NO_LABEL):
        told = column.is_valid().to_numpy(zero_copy_only=False) & (values != _NO_LABEL)
        starts, values = np.concatenate([[0], told.cumsum()])[starts], values[told]
    yield from _both(("largest", "smallest"), values, starts)


def _missing(column: pa.Array, depth: int, starts: _Numbers) -> Iterator[tuple[str, int, int, int]]:
    if column.null_count:
        first = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
        yield f"missing, {depth}", 1, int(np.searchsorted(starts, first, side="right")) - 1, 0


def _both(names: tuple[str, str], values: _Numbers, starts: _Numbers) -> Iterator[tuple[str, int, int, int]]:
    """The greatest and the least of the rows' values; those of row i are from starts[i] to starts[i + 1]."""
    sizes = np.diff(starts)
    rows = np.flatnonzero(sizes)
    if not len(rows):
        return
    for name, best, sign in ((names[0], np.maximum, 1), (names[1], np.minimum, -1)):
        found = best.reduceat(values, starts[rows])
        those = rows[found == best.reduce(found)]
        row = those[sizes[those].argmin()]
        yield name, sign * int(best.reduce(found)), int(row), int(sizes[row])


def _numbers(given: pa.Array | pa.ChunkedArray) -> _Numbers:
    """Whole numbers, 0 where there is none."""
    filled = pc.fill_null(given, 0)
    found: _Numbers = (
        filled.to_numpy() if isinstance(filled, pa.ChunkedArray) else filled.to_numpy(zero_copy_only=False)
    )
    return found


def _innermost(kind: pa.DataType) -> pa.DataType:
    return _innermost(kind.value_type) if _is_list(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
