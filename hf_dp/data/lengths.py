"""What a row is made of, and how long that is, roughly: what rows are sorted by."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any


def columns_of(row: Any) -> list[tuple[Any, Any]] | None:
    """Names and values of a mapping, places and values of a list or a tuple; None of a row that has no columns."""
    if isinstance(row, Mapping):
        return list(row.items())
    return list(enumerate(row)) if isinstance(row, (list, tuple)) else None


def length(example: Any) -> int:
    """The length of the longest value of an example, 0 where nothing has a length."""
    values = example.values() if isinstance(example, Mapping) else ()
    return max((length_of(value) for value in values), default=0)


def length_of(value: Any) -> int:
    """The length of a list, a text or an array (of its first axis), 0 for what has none."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 0
    return len(value) if isinstance(value, Sized) else 0
