"""Rows of different kinds in one micro-batch: whole numbers among broken ones, or a column that only some have.

Collators go by a batch's first row: whether a label is a class or a number, and which columns there are. Of a file in
JSON, where 3 is whole and 2.75 is not, one row then decides what the labels of all others become.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from hf_dp.errors import ConfigurationError

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def kind_of(row: Any) -> Hashable:
    """What a row is made of: for each column the types of its numbers, and of the first."""
    if isinstance(row, Mapping):
        return frozenset((name, _kind(value)) for name, value in row.items())
    if isinstance(row, (tuple, list)):
        return tuple(map(_kind, row))
    return kind_of(vars(row)) if hasattr(row, "__dict__") and not hasattr(row, "dtype") else _kind(row)


def refuse_changed(
    name: str, alone: Callable[[Any], Mapping[str, Any]], rows: list[Any], batch: Mapping[str, Any], *, draws: bool
) -> None:
    """Holds a micro-batch of rows of different kinds against what each row is by itself.

    What a row gets besides, for each of its positions (a blank picture, say), is padding, which is looked at in the
    model.

    Args:
        name: of the collator.
        alone: makes a micro-batch of one row, and moves no random number.
        rows: as they were before the collator, which may change them.
        batch: made of them.
        draws: whether random numbers were drawn for it: then types alone are looked at.

    Raises:
        ConfigurationError: a row comes out otherwise than by itself.
    """
    numbers = {column for column, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() == 1}
    for i, row in enumerate(rows):
        by_itself = alone(row)
        flags = {column for made in (batch, by_itself) for column, value in made.items() if isinstance(value, bool)}
        for column in sorted({*by_itself, *numbers, *flags}):
            own = by_itself.get(column)
            if (
                column in numbers - by_itself.keys()
                or (column in flags and batch.get(column) is not own)
                or (isinstance(own, torch.Tensor) and not _is_same(batch.get(column), i, own, draws))
            ):
                raise ConfigurationError(
                    f"the data collator {name} makes {column!r} of a row otherwise when rows of other types are beside "
                    "it.",
                    why="one row, whose label is a whole number among broken ones, or which lacks a column, "
                    "decides what becomes of its neighbours, so clipping it does not bound what it changes.",
                    fix="give each column one type in all rows (float(label) for all, or int(label)), and all rows "
                    "the same columns, None in no row or in all.",
                )


def _is_same(batch: Any, i: int, alone: torch.Tensor, draws: bool) -> bool:
    """Whether row i is that of the example alone, perhaps padded, on one side or the other."""
    if not isinstance(batch, torch.Tensor) or batch.dtype != alone.dtype or batch.dim() != alone.dim():
        return False
    if draws:
        return True
    right, left, own = batch[i], batch[i], alone[0]
    for axis, n in enumerate(own.shape):
        if n > right.shape[axis]:
            return False
        right, left = right.narrow(axis, 0, n), left.narrow(axis, left.shape[axis] - n, n)
    if any(torch.equal(cut, own) for cut in (right, left)):
        return True
    is_rounded = own.is_floating_point()
    return is_rounded and any(torch.allclose(cut, own, rtol=1e-6, equal_nan=True) for cut in (right, left))


def _kind(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        types = frozenset(map(type, value))
        # Collators go by the first here, too.
        first = _kind(value[0]) if len(value) else None
        return first, types if types <= _PLAIN else frozenset(map(_kind, value))
    if isinstance(value, Mapping):
        return kind_of(value)
    kind: Any = str(value.dtype) if hasattr(value, "dtype") else type(value)
    return kind  # type: ignore[no-any-return]
