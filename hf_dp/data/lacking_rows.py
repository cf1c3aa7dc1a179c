"""Is what a row lacks (a number, a label) taken from the rows beside it?

A collator fills it with a mean, the most frequent value or the row before: what few rows lack, and none that is looked
at need. That others stay as they are beside such a row shows nothing of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

Collated = Mapping[str, Tensor]


def follows_from_others(
    row: Any, examples: list[Any], collated: Callable[[list[Any]], Collated], *, draws: bool
) -> bool:
    """Whether what a collator makes of a row is another where other examples are beside it, or before it.

    Not of a row that it cannot make anything of, nor where it becomes as wide as nothing beside it.

    Args:
        row: of a dataset, or one that could be.
        examples: two or more, of which the last is no narrower than the others.
        collated: from the same global random state.
        draws: whether random numbers are drawn, which are others in other places.
    """
    first, last = examples[0], examples[-1]
    arrangements = [[row, first, last], [row, last, last], [row, row, last]]
    if not draws:
        arrangements += [[first, row, last], [last, row, first], [row, row, row]]
    found: list[Collated] = []
    for rows in arrangements:
        with suppress(Exception):  # a collator may refuse such a row in any way
            # Each a row of its own, which a collator may change in place.
            batch = collated([copy.deepcopy(one) for one in rows])
            places = [i for i, one in enumerate(rows) if one is row and not (draws and i)]
            found += [{name: value[i] for name, value in batch.items()} for i in places]
    return not _are_alike(found)


def _are_alike(rows: Iterable[Collated]) -> bool:
    """Whether all that are as wide as each other are the same."""
    known: dict[Any, Collated] = {}
    return all(_is_same(row, known.setdefault(_shapes(row), row)) for row in rows)


def _shapes(row: Collated) -> Any:
    return frozenset((name, value.shape) for name, value in row.items())


def _is_same(one: Collated, two: Collated) -> bool:
    return all(
        value.dtype == two[name].dtype and torch.allclose(value, two[name], rtol=1e-6, atol=0, equal_nan=True)
        for name, value in one.items()
    )
