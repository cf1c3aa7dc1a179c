"""Rows that a selection has several times, as where rare classes are sampled more often: less is promised to these."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import ConcatDataset, Subset

import hf_dp.ranks as ranks

logger = logging.getLogger(__name__)


def warn_of_repeated(dataset: Any) -> None:
    """Says that a row which is there several times is promised less."""
    if (most := most_often(dataset)) > 1:
        ranks.warn(
            logger,
            "The training dataset has a row up to %d times (by select, Subset or ConcatDataset). What is promised is "
            "promised to each of these, and less to the one that they are of. Have each row once, and weight its loss "
            "(compute_per_example_loss); or number rows in a column before they are repeated, and make that the unit: "
            "PrivacyConfig(unit=..., max_examples_per_unit=%d).",
            most,
            most,
        )


def most_often(dataset: Any) -> int:
    """How many times `dataset` has a row at most, as far as its selections tell; 1 where they do not."""
    places = _places(dataset)
    return 1 if places is None or not len(places) else int(np.unique(places, axis=0, return_counts=True)[1].max())


def _places(dataset: Any) -> Any:
    """(n, 2): of each row which table it is of, and where it lies there; None for no selection that is known."""
    if isinstance(dataset, Subset):
        return _of(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_of(part) for part in dataset.datasets])
    if isinstance(dataset, Dataset) and dataset._indices is not None:
        rows = dataset._indices.column(0).to_numpy()
        return np.stack([np.full(len(rows), id(dataset.data)), rows], axis=1)
    return None


def _of(dataset: Any) -> Any:
    places = _places(dataset)
    if places is not None:
        return places
    table = id(dataset.data if isinstance(dataset, Dataset) else dataset)
    return np.stack([np.full(len(dataset), table), np.arange(len(dataset))], axis=1)
