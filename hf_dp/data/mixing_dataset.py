"""For the check before the first step: does a dataset make a row of other rows, or with a generator of its own?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from hf_dp.data.stored_reads import mixes_stored_rows
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import seed_global_state, unchanged_global_state

_STATES = 8
_ROWS = 4
_ROUNDING = 1e-6
_BY_PLACE = ("iloc", "loc", "iat", "at", "values")
Reads = dict[int, set[Hashable]]


def check_dataset(dataset: Any) -> None:
    """Refuses a dataset that draws from a generator of its own, or reads other rows, chosen at random, with each.

    A few rows are read again and again under one global random state, and must stay as they are. What an object in a
    row holds is not looked at, nor a `datasets.Dataset` without a transform, which gives what it stores.

    A dataset of Python's is read under eight random states as well, from a copy whose containers (lists, dicts, arrays,
    tables, other datasets) note what they are asked for. One as long as the dataset that is asked for the same place in
    each reading of a row, and for others in some (MixUp, random negatives), is refused. What the copy cannot be read by
    is not looked at. Tables of `datasets` are seen wherever they are named, by transforms too.

    Raises:
        ConfigurationError: with the dataset's class.
    """
    if not (n := len(dataset)):
        return
    rows = sorted({i * (n - 1) // max(1, _ROWS - 1) for i in range(_ROWS)})
    _refuse_own_generator(dataset, rows)
    if mixes_stored_rows(dataset):
        its = " by its transform" if isinstance(dataset, datasets.Dataset) else ""
        raise _mixes(f"{type(dataset).__name__}{its}")
    if not isinstance(dataset, torch.utils.data.Dataset) or type(dataset).__module__.startswith("datasets."):
        return
    reads: Reads = {}
    try:
        noting = _noting(dataset, reads, n)
        for row in rows:
            if any(_is_mixed(found) for found in _read(noting, row, reads)):
                break
        else:
            return
    except Exception:  # noqa: BLE001 - whatever a dataset does that is no longer given its own containers
        return
    raise _mixes(type(dataset).__name__)


def _mixes(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} makes a row of its own data and of other rows, which it chooses at random.",
        why="an example would be in the rows of others (MixUp, CutMix, random negatives), so that it adds more to a "
        "step than clipping bounds, and to steps that have not drawn it.",
        fix="make each row of its own data alone; or choose the others once, from public data.",
    )


@unchanged_global_state()
def _refuse_own_generator(dataset: Any, rows: Sequence[int]) -> None:
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        return

    def read(row: int) -> Any:
        seed_global_state(0)
        return dataset[row]

    # A copy, as a dataset may give the same object each time; row after row, as it may keep the one before.
    first = {row: copy.deepcopy(read(row)) for row in rows}
    for _ in range(_STATES - 1):
        for row in rows:
            if not is_alike(first[row], read(row), is_row=True):
                its = ", by its transform," if isinstance(dataset, datasets.Dataset) else ""
                raise ConfigurationError(
                    f"{type(dataset).__name__}{its} gives another row when it is read again under the same global "
                    "random state.",
                    why="it draws from another generator than these, counts its reads, or remembers rows; where one is "
                    "kept, which rows are read decides what all later ones become, and one example more or less moves "
                    "the sum by more than clipping bounds.",
                    fix="draw from the global generators of torch, numpy or Python, which hf_dp seeds; or seed one's "
                    "own anew for each row, by a number drawn from those or stored with the row (of "
                    "albumentations: transform.set_random_seed(int(np.random.randint(2**31)))).",
                )


def is_alike(one: Any, other: Any, *, is_row: bool = False) -> bool:
    """Whether two readings are not seen to differ: numbers but for rounding, and of objects a row's own alone."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=_ROUNDING) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, (str, bytes, int)):
        return bool(one == other)
    if isinstance(one, Tensor):
        if not one.is_floating_point():
            return torch.equal(one, other)
        return one.shape == other.shape and torch.allclose(one, other.to(one), rtol=_ROUNDING, atol=0, equal_nan=True)
    if hasattr(one, "__array__") or hasattr(one, "__array_interface__"):  # arrays, columns of tables, images
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype.kind in "mM":
            return np.array_equal(one, other, equal_nan=True)
        if one.dtype.kind in "fc":
            return one.shape == other.shape and np.allclose(one, other, rtol=_ROUNDING, atol=0, equal_nan=True)
        return is_alike(one.tolist(), other.tolist()) if one.dtype == object else np.array_equal(one, other)
    return not (is_row and hasattr(one, "__dict__")) or is_alike(vars(one), vars(other))


def _read(noting: Any, row: int, reads: Reads) -> list[list[set[Hashable]]]:
    """Of each container, what it was asked for in each reading of a row."""
    found = []
    for state in range(_STATES):
        for seen in reads.values():
            seen.clear()
        with unchanged_global_state():
            seed_global_state(state)
            noting[row]
        found.append({name: set(seen) for name, seen in reads.items()})
    return [[each.get(name, set()) for each in found] for name in reads]


def _is_mixed(readings: Sequence[set[Hashable]]) -> bool:
    always = set.intersection(*readings)
    return bool(always) and set.union(*readings) != always


def _noting(value: Any, reads: Reads, n: int) -> Any:
    """`value`, or what stands for it and notes what it is asked for."""
    is_dataset, is_text = isinstance(value, torch.utils.data.Dataset), isinstance(value, (str, bytes))
    if is_text or not hasattr(value, "__getitem__") or (hasattr(value, "__len__") and len(value) < n):
        return value
    seen = reads.setdefault(len(reads), set())

    def note(key: Any) -> None:
        key = key[0] if isinstance(key, tuple) and key else key
        place = key.item() if getattr(key, "ndim", None) == 0 else key
        if isinstance(place, (int, str)):
            seen.add(place)

    if isinstance(value, (list, dict)):
        return _noted(list if isinstance(value, list) else dict, note)(value)
    if is_dataset and not type(value).__module__.startswith("datasets."):
        return _of_python(value, note, reads, n)
    return _Table(value, note, lambda part: _noting(part, reads, n))


def _of_python(dataset: Any, note: Callable[[Any], None], reads: Reads, n: int) -> Any:
    # Neither made nor ended as a dataset is, which may open files, and close those that both hold.
    noting: Any = object.__new__(_noted(type(dataset), note, __del__=lambda self: None))
    for name, value in vars(dataset).items():
        vars(noting)[name] = _noting(value, reads, n)
    return noting


def _noted(kind: Any, note: Callable[[Any], None], **methods: Any) -> Any:
    """A class of containers as `kind`, which note what they are asked for."""

    def read(self: Any, key: Any) -> Any:
        note(key)
        return kind.__getitem__(self, key)

    return type(kind.__name__, (kind,), {"__getitem__": read, **methods})


class _Table:
    """In place of arrays, tables and their columns."""

    def __init__(self, value: Any, note: Callable[[Any], None], part: Callable[[Any], Any]) -> None:
        self._value, self._note, self._part = value, note, part
        self._parts: dict[str, Any] = {}

    def _of(self, name: str, get: Callable[[], Any]) -> Any:
        if name not in self._parts:
            self._parts[name] = self._part(get())
        return self._parts[name]

    def __getattr__(self, name: str) -> Any:
        if name in _BY_PLACE:
            return self._of(f".{name}", lambda: getattr(self._value, name))
        return getattr(self._value, name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._of(key, lambda: self._value[key])
        self._note(key)
        return self._value[key]

    def __len__(self) -> int:
        return len(self._value)
