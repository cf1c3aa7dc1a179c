"""Rows that the data need not hold: one column after the other has other numbers, of the same types and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hf_dp.data.lengths import columns_of

LABELS = ("label", "labels", "label_ids")


def _unchanged(number: Any) -> Any:
    return number


# Of floats, and of whole numbers, which are no label below 0, where they stay. As arithmetic, which arrays know too.
_CHANGES: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda x: x * 1000 + 1, lambda n: n + (n >= 0)),
    (lambda x: -(x * 1000 + 1), lambda n: n * (n < 0)),
    (lambda x: x - x + 1, lambda n: n * (n < 0) + (n >= 0)),
    (lambda x: x - x, lambda n: n * (n < 0) + -1 * (n >= 0)),
    (lambda x: x * math.nan, lambda n: n * (n < 0) + -100 * (n >= 0)),
    (lambda x: x - x + math.inf, lambda n: n),
)


def strange_rows(row: Any) -> Iterator[Any]:
    """Versions of `row`, a mapping, a list or a tuple of columns; none of others.

    Of whole numbers in a mapping labels alone: a collator may keep what it makes by the number of a row.
    """
    for name, value in columns_of(row) or ():
        is_label = not isinstance(row, Mapping) or name in LABELS
        for of_floats, of_whole in _CHANGES if is_label else [(change, _unchanged) for change, _ in _CHANGES]:
            if (changed := _changed(value, of_floats, of_whole)) is not value:
                if isinstance(row, Mapping):
                    yield {**row, name: changed}
                else:
                    strange = [*row[:name], changed, *row[name + 1 :]]
                    yield strange if isinstance(row, list) else tuple(strange)


def _changed(value: Any, of_floats: Callable[[Any], Any], of_whole: Callable[[Any], Any]) -> Any:
    """`value` with other numbers in it; itself where there are none."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = [_changed(item, of_floats, of_whole) for item in value]
        is_same = all(item is before for item, before in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    kind = str(value.dtype) if isinstance(value, (np.ndarray, np.generic, Tensor)) else type(value).__name__
    if "bool" in kind:
        return (value == value) if of_floats(0.0) > 0 else (value != value)
    if "float" in kind:
        return of_floats(value)
    if "int" in kind and of_whole is not _unchanged:
        return of_whole(value)
    return value
