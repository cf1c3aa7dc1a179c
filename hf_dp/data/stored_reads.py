"""Does a row of a dataset follow from other rows of the training data, which a transform or a class reads in the tables
of `datasets`, wherever these are named?"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import datasets
import numpy as np
import torch

import hf_dp.ranks as ranks
from hf_dp.data.repeated import Places
from hf_dp.randomness import seed_global_state, unchanged_global_state

logger = logging.getLogger(__name__)

_ROWS, _STATES = 4, 8
# Of one table, the rows that a reading asked for.
Reads = dict[int, set[int]]


def warn_of_rows_of_others(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
    """Says whom a promise to rows is made to, where a transform or the collator puts other rows into each, always the
    same ones. Nothing is said where there is no `collate`: of units."""
    found = [] if collate is None else _readings(dataset, 2, collate)
    if any(set.intersection(*map(_all, states)) - {own} for own, states in found if own is not None):
        ranks.warn(
            logger,
            "A row of the training data is made of its own and of other rows, which its transform, or the collator, "
            "reads (the one before it, an example of its class). What is promised is promised to a row, and much less "
            "to a text, or a person, that is in several (docs/privacy.md). Make each row of its own data alone, take "
            "the others from public data, or make whose they are the unit: PrivacyConfig(unit=..., "
            "max_examples_per_unit=...).",
        )


def mixes_stored_rows(dataset: Any) -> bool:
    """Whether a row is made of other rows of the same tables, chosen at random.

    A few rows are read under eight random states. In a table where each of these asks for a row's own place, others in
    some alone are chosen (MixUp, random negatives, a few examples before a question).
    """
    for _, states in _readings(dataset, _STATES):
        tables = set().union(*states)
        for table in tables:
            read = [state.get(table, set()) for state in states]
            always = set.intersection(*read)
            if always and set.union(*read) != always:
                return True
    return False


def _readings(
    dataset: Any, number: int, collate: Callable[[list[Any]], Any] | None = None
) -> list[tuple[int | None, list[Reads]]]:
    """Of a few rows the own place, where it is known, and what is read in each of so many random states; nothing of
    what fails.

    Only where reading computes something: of a table of `datasets` its transform does, or what collates its rows.
    """
    is_table = isinstance(dataset, datasets.Dataset)
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom" and collate is None:
        return []
    if not (is_table or isinstance(dataset, torch.utils.data.Dataset)) or not (n := len(dataset)):
        return []
    places = Places()
    known = places.of(dataset) if is_table or isinstance(dataset, torch.utils.data.Subset) else None
    found: list[tuple[int | None, list[Reads]]] = []
    try:
        with unchanged_global_state():
            for row in sorted({i * (n - 1) // max(1, _ROWS - 1) for i in range(_ROWS)}):
                states = []
                for state in range(number):
                    seed_global_state(state)
                    with _noted(places) as asked:
                        one = dataset[row]
                        if collate is not None:
                            collate([copy.deepcopy(one)])
                    if not asked:  # it has no such tables, or holds all that it needs of them
                        return []
                    states.append(_by_table(asked, known))
                found.append((None if known is None else int(known[row]), states))
    except Exception:  # noqa: BLE001 - a row that cannot be read is refused elsewhere, with what to do
        return []
    return found


def _by_table(asked: Sequence[np.ndarray], known: np.ndarray | None) -> Reads:
    """Of the training data alone, where it is known which rows that are."""
    reads: Reads = defaultdict(set)
    for rows in asked:
        for place in rows if known is None else rows[np.isin(rows, known)]:
            reads[Places.table_of(int(place))].add(int(place))
    return dict(reads)


@contextmanager
def _noted(places: Places) -> Iterator[list[np.ndarray]]:
    """The places that are read inside, of all datasets that there are."""
    asked: list[np.ndarray] = []
    read, known = datasets.Dataset._getitem, dict[int, tuple[Any, np.ndarray]]()

    def noting(self: Any, key: Any, **options: Any) -> Any:
        if not isinstance(key, str):  # of a column that is asked for whole nothing is chosen
            if id(self) not in known:
                known[id(self)] = self, places.of(self)
            index = key if isinstance(key, slice) else np.atleast_1d(np.asarray(key))
            asked.append(known[id(self)][1][index])
        return read(self, key, **options)

    with mock.patch.object(datasets.Dataset, "_getitem", noting):
        yield asked


def _all(reads: Reads) -> set[int]:
    return set().union(*reads.values())
