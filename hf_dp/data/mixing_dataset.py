"""For the check before the first step: does a dataset make a row of other rows, that it chooses at random?"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hf_dp.errors import ConfigurationError
from hf_dp.randomness import seed_global_state, unchanged_global_state

_STATES = 8
_ROWS = 4
_BY_PLACE = ("iloc", "loc", "iat", "at", "values")
Reads = dict[int, set[Hashable]]


def check_dataset(dataset: Any) -> None:
    """Refuses a dataset of Python's that reads other rows, chosen at random, with its own (MixUp, random negatives).

    A few rows are read under eight random states from a copy whose containers (lists, dicts, arrays, tables, other
    datasets) note what they are asked for. One as long as the dataset that is asked for the same place in each reading
    of a row, and for others in some, is refused. What the copy cannot be read by is not looked at.

    Raises:
        ConfigurationError: with the dataset's class.
    """
    n = len(dataset)
    if not n or not isinstance(dataset, torch.utils.data.Dataset) or type(dataset).__module__.startswith("datasets."):
        return
    reads: Reads = {}
    try:
        noting = _noting(dataset, reads, n)
        for row in sorted({i * (n - 1) // max(1, _ROWS - 1) for i in range(_ROWS)}):
            if any(_is_mixed(found) for found in _read(noting, row, reads)):
                break
        else:
            return
    except Exception:  # noqa: BLE001 - whatever a dataset does that is no longer given its own containers
        return
    raise ConfigurationError(
        f"{type(dataset).__name__} makes a row of its own data and of other rows, which it chooses at random.",
        why="an example would be in the rows of others (MixUp, CutMix, random negatives), so that it adds more to a "
        "step than clipping bounds, and to steps that have not drawn it.",
        fix="make each row of its own data alone; or choose the others once, from public data.",
    )


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

    if isinstance(value, list):
        return _List(value, note)
    if isinstance(value, dict):
        return _Dict(value, note)
    if is_dataset and not type(value).__module__.startswith("datasets."):
        return _of_python(value, note, reads, n)
    return _Table(value, note, lambda part: _noting(part, reads, n))


def _of_python(dataset: Any, note: Callable[[Any], None], reads: Reads, n: int) -> Any:
    kind = type(dataset)

    def read(self: Any, key: Any) -> Any:
        note(key)
        return kind.__getitem__(self, key)

    # Neither made nor ended as a dataset is, which may open files, and close those that both hold.
    noting: Any = object.__new__(type(kind.__name__, (kind,), {"__getitem__": read, "__del__": lambda self: None}))
    for name, value in vars(dataset).items():
        vars(noting)[name] = _noting(value, reads, n)
    return noting


class _List(list[Any]):
    def __init__(self, values: list[Any], note: Callable[[Any], None]) -> None:
        super().__init__(values)
        self._note = note

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)


class _Dict(dict[Any, Any]):
    def __init__(self, values: dict[Any, Any], note: Callable[[Any], None]) -> None:
        super().__init__(values)
        self._note = note

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)


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
