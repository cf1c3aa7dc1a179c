"""Rows of different kinds in one micro-batch: whole numbers among broken ones, or a column that only some have.

Collators go by a batch's first row: whether a label is a class or a number, and which columns there are. Of a file in
JSON, where 3 is whole and 2.75 is not, one row then decides what the labels of all others become.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from hf_dp.errors import ConfigurationError

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def kind_of(row: Any) -> Hashable:
    """What a row is made of: for each column the types of its numbers."""
    if isinstance(row, Mapping):
        return frozenset((name, _kind(value)) for name, value in row.items())
    return tuple(map(_kind, row)) if isinstance(row, (tuple, list)) else _kind(row)


class Kinds:
    """Holds micro-batches of rows of different kinds against what each row is by itself.

    Which kinds do not harm one another, and in which of them the first is, is found out once.

    Args:
        name: of the collator.
        alone: makes a micro-batch of one row, and moves no random number.
    """

    def __init__(self, name: str, alone: Callable[[Any], Mapping[str, Any]]) -> None:
        self._name, self._alone, self._harmless = name, alone, set[tuple[Hashable, frozenset[Hashable]]]()

    def unlike(self, rows: list[Any]) -> list[Any]:
        """Copies of `rows`, which collators may change, if their kinds are not known to do no harm; else none."""
        together = _together(rows)
        return [] if len(together[1]) == 1 or together in self._harmless else copy.deepcopy(rows)

    def refuse_changed(self, rows: list[Any], batch: Mapping[str, Any]) -> None:
        """Looks at `batch`, made of rows that are `unlike`: its types, and what has one number for each row.

        Raises:
            ConfigurationError: a row comes out otherwise than by itself.
        """
        for i, row in enumerate(rows):
            # What a row gets besides (a blank picture, say) is padding, which is looked at in the model.
            for name, value in self._alone(row).items():
                if isinstance(value, torch.Tensor) and not _is_same(batch.get(name), i, value):
                    raise ConfigurationError(
                        f"the data collator {self._name} makes {name!r} of a row otherwise when rows of other types "
                        "are beside it.",
                        why="one row, whose label is a whole number among broken ones, or which lacks a column, "
                        "decides what becomes of its neighbours, so clipping it does not bound what it changes.",
                        fix="give each column one type in all rows (float(label) for all, or int(label)), and all rows "
                        "the same columns; a datasets.Dataset does.",
                    )
        self._harmless.add(_together(rows))


def _together(rows: list[Any]) -> tuple[Hashable, frozenset[Hashable]]:
    """The kind of the first, and all kinds."""
    kinds = [kind_of(row) for row in rows]
    return kinds[0], frozenset(kinds)


def _is_same(batch: Any, i: int, alone: torch.Tensor) -> bool:
    if not isinstance(batch, torch.Tensor) or batch.dtype != alone.dtype:
        return False
    # What is longer may be padded.
    return batch.dim() > 1 or alone.dim() > 1 or torch.allclose(batch[i], alone[0], rtol=1e-6, equal_nan=True)


def _kind(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        types = frozenset(map(type, value))
        return types if types <= _PLAIN else frozenset(map(_kind, value))
    if isinstance(value, Mapping):
        return kind_of(value)
    kind: Any = str(value.dtype) if hasattr(value, "dtype") else type(value)
    return kind  # type: ignore[no-any-return]
