"""Which rows of a dataset belong to which unit, and which of them a step uses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from datasets import Dataset

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError
from hf_dp.figures import row_in_words
from hf_dp.randomness import Entropy, unchanged_global_state

# In place of a step, of rows that are chosen for all steps.
_ONCE = -1


class UnitRows:
    """The rows of each unit, numbered in the order of their first rows.

    Args:
        values: of each row, whose it is: texts, or bytes, or whole numbers.
        column: where they stand, for refusals.
        most: rows of one unit in one step.
        several: a row may belong to several units, of which it says a list.

    Raises:
        ConfigurationError: a row that says nothing, or something else.
    """

    def __init__(self, values: Iterable[Any], column: str, most: int, several: bool = False) -> None:
        numbers: dict[Any, int] = {}  # in the order of their first rows
        owners, places = [], []
        kind: type[Any] | None = None
        for row, value in enumerate(values):
            for one in _listed(value, row, column) if several else _alone(value, row, column):
                kind = _kind(one, row, column) if kind is None else kind
                if _kind(one, row, column) is not kind:
                    raise _refused(column, row, value, f"others are {kind.__name__}, and one person would be two")
                owners.append(numbers.setdefault(one, len(numbers)))
                places.append(row)
        self._most = most
        self._order = np.array(places, dtype=np.int64)[np.argsort(owners, kind="stable")]
        self._starts = np.concatenate([[0], np.bincount(owners, minlength=len(numbers)).cumsum()]).astype(np.int64)

    @classmethod
    def of(cls, dataset: Any, column: str, most: int, several: bool = False) -> UnitRows:
        """Those of a dataset with such a column (`ConfigurationError` without it)."""
        return cls(_values(dataset, column), column, most, several)

    def __len__(self) -> int:
        """n, the number of units."""
        return len(self._starts) - 1

    @property
    def rows(self) -> int:
        """Of all units together."""
        return int(self._order.max(initial=-1)) + 1

    @property
    def described(self) -> str:
        """The same for data that is divided alike, and for no other."""
        return hashlib.blake2b(self._order.tobytes() + self._starts.tobytes()).hexdigest()

    @property
    def has_shared(self) -> bool:
        """Some row belongs to several units."""
        return len(self._order) > self.rows

    def chosen(self, entropy: Entropy | None = None) -> list[int]:
        """Rows for all steps, ascending, of which no unit has more than it may.

        Without `entropy` it is the same whenever it is asked for, and follows from whose each row is and where it lies:
        in a random order each row is taken that gives none of its units too many, so that no further one could be
        (Ganesh et al. 2025, arXiv:2503.03622).

        Args:
            entropy: where n is secret, with which every row's place may change: what of a unit is chosen is `drawn`.
                No row may belong to several units.
        """
        if entropy is not None:
            assert not self.has_shared
            return sorted(row for unit in range(len(self)) for row in self.drawn(unit, _ONCE, entropy))
        owners: list[list[int]] = [[] for _ in range(self.rows)]
        for unit in range(len(self)):
            for row in self._order[self._starts[unit] : self._starts[unit + 1]].tolist():
                owners[row].append(unit)
        counts, found = [0] * len(self), []
        for row in Entropy(0).generator("the order in which rows are chosen", 0).permutation(self.rows).tolist():
            if all(counts[unit] < self._most for unit in owners[row]):
                found.append(row)
                for unit in owners[row]:
                    counts[unit] += 1
        return sorted(found)

    def count(self, unit: int) -> int:
        """How many rows of a unit a step uses."""
        return min(self._most, int(self._starts[unit + 1] - self._starts[unit]))

    def drawn(self, unit: int, step: int, entropy: Entropy) -> list[int]:
        """The rows of a unit that `step` uses, ascending: all, or of more than it may have so many, each subset as
        likely, whatever other units have."""
        rows = self._order[self._starts[unit] : self._starts[unit + 1]]
        if len(rows) > self._most:
            generator = entropy.generator(f"rows of unit {unit}", step)
            rows = rows[np.sort(generator.choice(len(rows), self._most, replace=False))]
        return [int(row) for row in rows]


def taken(dataset: Any, rows: list[int]) -> Any:
    """These rows of a dataset."""
    return dataset.select(rows) if isinstance(dataset, Dataset) else [dataset[row] for row in rows]


def without_column(dataset: Any, column: str) -> Any:
    """The dataset as models may see it."""
    if isinstance(dataset, Dataset):
        if dataset.format["type"] == "custom" and len(dataset):
            _try_transform(dataset.remove_columns([column]), column)
        return dataset.remove_columns([column])
    return [{name: value for name, value in row.items() if name != column} for row in dataset]


def _try_transform(dataset: Dataset, column: str) -> None:
    try:
        with unchanged_global_state():
            dataset[0]
    except KeyError as error:
        raise ConfigurationError(
            f"a transform of the training dataset that reads {error} where the column {column!r} is taken out.",
            why="whose an example is is no part of what a model sees.",
            fix="leave the column alone in the transform: DPTrainer reads it from the dataset itself.",
        ) from error


def _values(dataset: Any, column: str) -> Iterable[Any]:
    if isinstance(dataset, Dataset) and column in dataset.column_names:
        return list(dataset.with_format(None)[column])
    if isinstance(dataset, list) and all(isinstance(row, Mapping) and column in row for row in dataset):
        return [row[column] for row in dataset]
    has, one = "is no such table", ""
    if isinstance(dataset, Dataset):
        has = f"has the columns {', '.join(dataset.column_names)}"
        one = "give unit= the name of the column that says whose each row is, if one of these does; or "
    elif isinstance(dataset, list):
        has = "has a row without it"
    raise ConfigurationError(
        f"unit={column!r}, and the training dataset ({type(dataset).__name__}) {has}.",
        why="whose each example is must be known before any is drawn.",
        fix=f"{one}give a datasets.Dataset, or a list of dicts ([dataset[i] for i in range(len(dataset))] makes one of "
        "another), with that column. What prepares the data (map(), a trainer) may have dropped it: keep it beside the "
        "model's columns; the model does not see it.",
    )


def _alone(value: Any, row: int, column: str) -> tuple[Any]:
    if isinstance(value, (list, tuple, set)):
        problem = "a row of several units is none's alone, and is drawn by itself (unit_sampling='examples')"
        raise _refused(column, row, value, problem)
    return (value,)


def _listed(value: Any, row: int, column: str) -> list[Any]:
    """Each of the units that a row names, once."""
    if not isinstance(value, (list, tuple)):
        return [value]
    if not value:
        raise _refused(column, row, value, "it is nobody's, and nobody would be promised anything about it")
    for one in value:
        _kind(one, row, column)
    return list(dict.fromkeys(value))


def _kind(value: Any, row: int, column: str) -> type[Any]:
    if value is None or (isinstance(value, (str, bytes)) and not value.strip()):
        raise _refused(column, row, value, "it says nothing, and all such rows would be one unit")
    for kind in (str, bytes):
        if isinstance(value, kind):
            return kind
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int
    raise _refused(column, row, value, f"it is a {type(value).__name__}: it names no unit")


def _refused(column: str, row: int, value: Any, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"{row_in_words(row)} of the training data has {shown(value)} in the column {column!r}.",
        why=f"{problem}.",
        fix="give each row one value, a text or a whole number (or, with unit_sampling='examples', a list of such); a "
        "row that is nobody's gets one that no other row has.",
    )
