"""Rows that are one row several times, by where they lie: whom a promise to rows is made to."""

from __future__ import annotations

import logging
from typing import Any

import datasets
import numpy as np
import torch

import hf_dp.ranks as ranks

logger = logging.getLogger(__name__)

# So many rows of one place are told apart.
_BITS = 40


def warn_of_repeated(dataset: Any, *, is_told: bool = True) -> None:
    """Says whom a promise to rows is made to, where some are there several times, after what was mapped last. That rows
    of several places are alike is not looked at.

    Args:
        is_told: whether it may be said how many, which is an exact function of the data.
    """
    found = np.unique(Places().of(dataset), return_counts=True)[1]
    if (most := int(found.max(initial=1))) > 1:
        others = f"{(found - 1).sum()} of the {found.sum()} rows", f", and one is there {most} times"
        ranks.warn(
            logger,
            "%s of the training data are another one once more%s (by select, interleave_datasets, Subset or a list "
            "that is multiplied, say). What is promised is to a row, and much less to an example that is several "
            "(docs/privacy.md). Have each row once, and weight its loss (compute_per_example_loss); or number rows in "
            "a column before they are repeated, and make that the unit: "
            "PrivacyConfig(unit=..., max_examples_per_unit=%s).",
            *((*others, most) if is_told else ("Rows", "", "...")),
        )


def are_in_both(one: Any, other: Any) -> bool:
    """Whether some rows are in two datasets, by where they lie: both are parts of one that was not mapped since."""
    places = Places()
    return bool(np.isin(places.of(one), places.of(other)).any())


class Places:
    """A number for each place that rows come from: two of one number are one row."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, dataset: Any) -> np.ndarray:
        """(n,) whole numbers."""
        if isinstance(dataset, torch.utils.data.Subset):
            of, rows = dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)
            return self.of(of)[rows] if hasattr(of, "__len__") else self._begin(id(of)) + rows
        if isinstance(dataset, torch.utils.data.ConcatDataset):
            return np.concatenate([self.of(one) for one in dataset.datasets])
        if isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset):
            return -np.fromiter(map(id, dataset), np.int64, len(dataset))  # below all others
        chunks = _chunks(dataset.data) if isinstance(dataset, datasets.Dataset) else None
        if chunks is None:
            return self._begin(id(dataset)) + np.arange(len(dataset))
        parts = [self._begin(held) + chunk.offset + np.arange(len(chunk)) for chunk, held in chunks]
        whole = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        indices = dataset._indices
        return whole if indices is None else whole[indices.column(0).to_numpy().astype(np.int64)]

    @staticmethod
    def table_of(place: int) -> int:
        """The number of what one of these lies in."""
        return place >> _BITS

    def _begin(self, place: Any) -> int:
        return self._known.setdefault(place, len(self._known)) << _BITS


def _chunks(table: Any) -> list[tuple[Any, tuple[int, ...]]] | None:
    """Of a column the parts, and where in memory each lies, which tables that are put together share. None where no
    column has a place, as one of nothing but None has not."""
    for column in table.columns:
        found = [
            (chunk, tuple(held.address for held in chunk.buffers() if held is not None)) for chunk in column.chunks
        ]
        if all(place for _, place in found):
            return found
    return None
