"""For the check before the first step: does what a row becomes follow from the rows that were read before it?"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import datasets
import torch
from torch import nn

from hf_dp.data.collate import LogicalBatchCollator, Prepared
from hf_dp.data.mixing_dataset import is_alike
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.checks.beside import computing
from hf_dp.per_example.checks.held import Held, Place, entries, put, role_of
from hf_dp.per_example.checks.values import NOTHING, SCALARS, same
from hf_dp.randomness import seed_global_state, unchanged_global_state

_ROWS = 16
# The golden ratio spreads them.
_SPREAD = (5**0.5 - 1) / 2
# So many times as many rows as were read: beyond what a warm-up counts to.
_MANY = 10**6
# So many datasets that one holds in a list.
_HELD = 64
_Make = Callable[[int], Any]
_Holders = Sequence[tuple[str, Any]]


def check_order(dataset: Any, collate: LogicalBatchCollator | Prepared) -> None:
    """Refuses a dataset, or a collator, that makes another row of an example when others came before it.

    Some rows from all over the data are read one after the other, and collated each by itself, and again each as the
    first, from what dataset and collator hold now and under one random state. So it is asked before any other row is
    read: who numbers labels as they come has a number for each by then. Numbers that change meanwhile (how many were
    read) are changed by much as well. Of rows that fail nothing is said, nor where the same is another when it is made
    twice: what draws it is for others to say.

    Args:
        dataset: as it was given.
        collate: what collates its rows, with what prepares its batches, where that is the user's.

    Raises:
        ConfigurationError: with the name of either.
    """
    n = len(dataset)
    # Neither with a period nor in their order, which data may have too (by length, say).
    places = list(dict.fromkeys(int(n * (i * _SPREAD % 1)) for i in range(_ROWS))) if n else []
    its = ", by its transform," if isinstance(dataset, datasets.Dataset) else ""
    rows = _made_after_any(f"{type(dataset).__name__}{its}", lambda i: dataset[i], places, _of_dataset(dataset))
    _made_after_any(
        f"the data collator {collate.name}",
        lambda i: collate.collated([copy.deepcopy(rows[i])]),
        list(rows),
        _of_function(collate.given),
    )


def left_as_it_was(dataset: Any, collate: LogicalBatchCollator | None = None) -> AbstractContextManager[None]:
    """What is read inside leaves nothing in a dataset, nor in a collator, so that `check_order` can still see what they
    number. Of one that has loaded nothing yet, for a single row: what that leaves in what is loaded stays."""
    return _put_back([*_of_dataset(dataset), *(() if collate is None else _of_function(collate.given))])


@contextmanager
def _put_back(holders: _Holders) -> Iterator[None]:
    """What is held is as it was, but for attributes that were nothing before: what is loaded stays so. With it, as
    beside a file, or what is not looked at and was exchanged, stays whatever else is another object now, which may say
    that it is open, where it stands, or which part of the data it is."""
    held = Held(holders)
    objects = [(owner, dict(entries(owner))) for owner in held.owners.values() if not isinstance(owner, dict)]
    kept: list[tuple[Any, Any, Any]] = []
    with held.put_back():
        yield
        for owner, before in objects:
            now = dict(entries(owner))
            others = {name: value for name, value in now.items() if value is not before.get(name, NOTHING)}
            is_loaded = any(before.get(n) is None and not isinstance(others[n], SCALARS) for n in others)
            if is_loaded or not all(map(role_of, others.values())) or any(map(_moves, now.values())):
                kept += [(owner, name, value) for name, value in others.items()]
    for owner, name, value in kept:
        put(owner, name, value)


def _moves(value: Any) -> bool:
    """Whether it is a file or the like, which goes on when it is read."""
    return any(hasattr(type(value), n) for n in ("__next__", "read"))


def _made_after_any(what: str, make: _Make, places: list[int], holders: _Holders) -> dict[int, Any]:
    """What is made at each of the `places`, where that does not fail; refused where it is another at the first."""
    first = _made(make, places[:1], holders)[1]  # what is loaded is loaded then
    found, kept = _made(make, places, holders)

    def twice(i: int) -> tuple[Any, Any]:
        one = copy.deepcopy(make(i))
        seed_global_state(0)
        return one, make(i)

    def refuse_others(given: Mapping[Place, Any], refusal: Callable[[str], ConfigurationError]) -> None:
        def is_other(i: int) -> bool:
            alone = _made(make, [i], holders, given)[0]
            return i in alone and not is_alike(found[i], alone[i], is_row=True)

        if not any(map(is_other, found)):
            return
        # What a generator of its own draws, or a count of all reads makes, is another at once.
        pairs = _made(twice, places, holders)[0].values()
        if all(is_alike(*pair, is_row=True) for pair in pairs):
            raise refusal(what)

    # What keeps nothing, as most do, need not be asked again.
    if kept:
        refuse_others({}, _refusal)
    # One number after a row, and another after many: what is known of a row by its number stays as it is.
    pairs = {place: (first.get(place, (NOTHING, NOTHING))[1], now) for place, (_, now) in kept.items()}
    moved = {place: two for place, two in pairs.items() if {*map(type, two)} <= {int, float} and two[0] != two[1]}
    # What rises beside a stream says where that stands: of one that has not begun yet it would be read to its end.
    rises_beside_a_stream = {place for place, (one, now) in moved.items() if now > one and _hold_a_stream(holders)}
    for many, unasked in ((_MANY, frozenset[Place]()), (-_MANY, rises_beside_a_stream)):
        if given := {place: many * (abs(now) + 1) for place, (_, now) in moved.items() if place not in unasked}:
            refuse_others(given, _counts)
    return found


def _hold_a_stream(holders: _Holders) -> bool:
    owners = [owner for owner in Held(holders).owners.values() if not isinstance(owner, dict)]
    return any(_moves(value) for owner in owners for _, value in entries(owner))


def _made(
    make: _Make, places: list[int], holders: _Holders, given: Mapping[Place, Any] = MappingProxyType({})
) -> tuple[dict[int, Any], dict[Place, tuple[Any, Any]]]:
    """And what is held that was another then, before and after; it is put back. Before, it holds what is `given`."""
    found: dict[int, Any] = {}
    held = Held(holders)
    with _put_back(holders), unchanged_global_state():
        for (path, name), value in given.items():
            if path in held.owners:
                put(held.owners[path], name, value)
        for i in places:
            seed_global_state(0)
            try:
                # It may be the same object each time, and hold what came later.
                found[i] = copy.deepcopy(make(i))
            except Exception:  # noqa: BLE001 - what a row does by itself is for others to say
                continue
        before, now = held.values, Held(holders).values
        pairs = {place: (before.get(place, NOTHING), now.get(place, NOTHING)) for place in {**before, **now}}
    return found, {place: pair for place, pair in pairs.items() if not same(*pair)}


def _of_dataset(dataset: Any) -> _Holders:
    """What may keep something when a row is read: a transform, a dataset of Python's, and datasets that it holds."""
    found: list[tuple[str, Any]] = []
    todo = [dataset]
    for number, one in enumerate(todo):  # which grows
        if isinstance(one, datasets.Dataset):
            transform = (one.format.get("format_kwargs") or {}).get("transform")
            found += _of_function(transform, f" {number}") if transform is not None else []
        elif type(one) not in (list, tuple):
            found += _of_function(one, f" {number}", "__getitem__")
            for value in vars(one).values() if hasattr(one, "__dict__") else ():
                if isinstance(value, (nn.Module, functools.partial)):
                    found += _of_function(value, f" {number}.{len(found)}")
                for inner in value[:_HELD] if isinstance(value, (list, tuple)) else (value,):
                    is_data = isinstance(inner, torch.utils.data.Dataset | datasets.Dataset)
                    todo += [inner] if is_data and not any(inner is known for known in todo) else []
    return found


def _of_function(function: Any, which: str = "", method: str = "__call__") -> list[tuple[str, Any]]:
    """As `computing`, under names of its own, and what a function, or the method of an object, names and has as
    defaults."""
    found = list(computing(function))
    own = function if isinstance(function, types.FunctionType) else getattr(type(function), method, None)
    if isinstance(own, types.FunctionType):
        found += computing(functools.partial(own, *(own.__defaults__ or ())))
    return [(f"{name}{which}", held) for name, held in found]


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} makes another row of an example when other rows came before it.",
        why="it keeps something of the rows that it has seen (a number for each label or word, in the order in which "
        "they come, a running mean or maximum), so one example more or less changes what becomes of all later ones.",
        fix="decide it beforehand and from what is public: a list of all labels, a tokenizer, constants to scale by; "
        "or for each row by itself.",
    )


def _counts(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} makes another row of an example when a number that it keeps, and changes as it goes, is another.",
        why="it counts rows or batches (to mask more of them later, or to cut them less), and how many there were "
        "follows from who was drawn: one example more or less changes what becomes of all later ones.",
        fix="let it follow from the number of steps, which is public (a callback that sets it from state.global_step); "
        "or leave it as it is in all steps.",
    )
