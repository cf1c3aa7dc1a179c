"""Rows that are windows over one series: whom a promise to rows is made to."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

import hf_dp.ranks as ranks
from hf_dp.data.first_seen import left_as_it_was
from hf_dp.data.lengths import columns_of
from hf_dp.randomness import unchanged_global_state

logger = logging.getLogger(__name__)

# So many neighbours are looked at, and so many different numbers must be in both of two: fewer are so by chance.
_LOOKED_AT, _SHARED = 4, 10
# So many of their positions, and so many places where one may begin in the other.
_LONGEST, _TRIED = 1 << 15, 64
_Numbers = np.ndarray[Any, np.dtype[Any]]


def warn_of_windows(dataset: Any) -> None:
    """Says whom a promise to rows is made to, where each is a window that others overlap."""
    if (column := overlapping_by(dataset)) is not None:
        ranks.warn(
            logger,
            "Rows of the training data overlap, as windows over one series do: in %r one begins with what the one "
            "before it ends with. What is promised is promised to a row, and much less to a number, or a person, that "
            "is in several (docs/privacy.md). Let each window begin where the one before it ends, or make the series, "
            "or whose it is, the unit: PrivacyConfig(unit=..., max_examples_per_unit=...).",
            column,
        )


def overlapping_by(dataset: Any) -> Any:
    """The column in which a row begins with what ends the one before it; None where nothing says so."""
    try:
        rows = list(map(_numbers, _first(dataset)))
    except Exception:  # noqa: BLE001 - a row that cannot be read is refused elsewhere, with what to do
        return None
    for one, other in pairwise(rows):
        for name in one.keys() & other.keys():
            if _goes_on(one[name], other[name]):
                return name
    return None


def _first(dataset: Any) -> list[Any]:
    """The first rows, as they were made: in another order neighbours stand apart."""
    places: Any = np.arange(len(dataset))
    while isinstance(dataset, torch.utils.data.Subset):
        dataset, places = dataset.dataset, np.asarray(dataset.indices)[places]
    if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        if dataset._indices is not None:
            places = dataset._indices.column(0).to_numpy()[places]
        return [dataset.data.slice(int(i), 1).to_pylist()[0] for i in np.sort(places)[:_LOOKED_AT]]
    rows = []
    for i in map(int, np.sort(places)[:_LOOKED_AT]):
        with unchanged_global_state(), left_as_it_was(dataset):
            rows.append(dataset[i])
    return rows


def _numbers(row: Any) -> dict[Any, _Numbers]:
    """Its columns of numbers, (length, ...) each."""
    found = {}
    for name, value in columns_of(row) or ():
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy() if value.dtype != torch.bfloat16 else value.float().cpu().numpy()
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (int, float, list, tuple)):
            try:
                value = np.asarray(value)
            except ValueError:  # lists of unequal lengths
                continue
        if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "iuf":
            found[name] = value
    return found


def _goes_on(one: _Numbers, other: _Numbers) -> bool:
    """Whether a row begins with what ends the one before it, and neither is periodic."""
    if one.shape[1:] != other.shape[1:] or not one[:1].size or not len(other):
        return False
    one, other = one[-_LONGEST:].reshape(min(len(one), _LONGEST), -1), other[:_LONGEST].reshape(-1, one[0].size)
    places = np.arange(max(1, len(one) - len(other)), len(one))
    # By the first of each of its numbers: most rows begin with the same ones, and rest on them for long.
    _, firsts = np.unique(other[:, 0], return_index=True)
    for at in np.sort(firsts)[:_SHARED]:
        is_within = places + at < len(one)
        is_so = (one[np.minimum(places + at, len(one) - 1)] == other[at]).all(1)
        places = places[is_so | ~is_within]
    return any(
        np.array_equal(one[i:], other[: len(one) - i])
        and not np.array_equal(one[i:], one[: len(one) - i])
        and len(np.unique(one[i:])) >= _SHARED
        for i in places[:_TRIED]
        if len(one) - i >= _SHARED or one[0].size >= _SHARED
    )
