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


def warn_of_repeated(dataset: Any) -> None:
    """Says whom a promise to rows is made to, where some are there several times, after what was mapped last. That rows
    of several places are alike is not looked at."""
    found = np.unique(_Places().of(dataset), return_counts=True)[1]
    if (most := int(found.max(initial=1))) > 1:
        ranks.warn(
            logger,
            "%d of the %d rows of the training data are another one once more, and one is there %d times (by select, "
            "interleave_datasets, Subset or a list that is multiplied, say). What is promised is to a row, and much "
            "less to an example that is several (docs/privacy.md). Have each row once, and weight its loss "
            "(compute_per_example_loss); or number rows in a column before they are repeated, and make that the unit: "
            "PrivacyConfig(unit=..., max_examples_per_unit=%d).",
            *(int((found - 1).sum()), int(found.sum()), most, most),
        )


def are_in_both(one: Any, other: Any) -> bool:
    """Whether some rows are in two datasets, by where they lie: both are parts of one that was not mapped since."""
    places = _Places()
    return bool(np.isin(places.of(one), places.of(other)).any())


class _Places:
    """A number for each place that rows come from: two of one number are one row."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, dataset: Any) -> np.ndarray:
        """(n,) whole numbers."""
        if isinstance(dataset, torch.utils.data.Subset):
            return self.of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
        if isinstance(dataset, torch.utils.data.ConcatDataset):
            return np.concatenate([self.of(one) for one in dataset.datasets])
        if isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset):
            return np.array([self._begin(id(row)) for row in dataset], dtype=np.int64)
        if not (isinstance(dataset, datasets.Dataset) and dataset.column_names):
            return self._begin(id(dataset)) + np.arange(len(dataset))
        # Of a table the memory of its first column, which tables that are put together share.
        parts = []
        for chunk in dataset.data.column(0).chunks:
            held = tuple(buffer.address for buffer in chunk.buffers() if buffer is not None)
            parts.append(self._begin(held) + chunk.offset + np.arange(len(chunk)))
        whole = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        indices = dataset._indices
        return whole if indices is None else whole[indices.column(0).to_numpy().astype(np.int64)]

    def _begin(self, place: Any) -> int:
        return self._known.setdefault(place, len(self._known)) << _BITS
