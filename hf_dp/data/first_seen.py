"""For the check before the first step: does what a row becomes follow from the rows that were read before it?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import datasets
import torch

from hf_dp.data.collate import LogicalBatchCollator, Prepared
from hf_dp.data.mixing_dataset import is_alike
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.checks.held import Held, computing, put
from hf_dp.per_example.checks.values import NOTHING, SCALARS, same
from hf_dp.randomness import seed_global_state, unchanged_global_state

_ROWS = 16
# The golden ratio spreads them without a period, which data may have too.
_SPREAD = (5**0.5 - 1) / 2
# So many datasets that one holds in a list.
_HELD = 64
_Make = Callable[[int], Any]
_Holders = Sequence[tuple[str, Any]]


def check_order(dataset: Any, collate: LogicalBatchCollator | Prepared) -> None:
    """Refuses a dataset, or a collator, that makes another row of an example when others came before it.

    Some rows from all over the data are read one after the other, and collated each by itself, and again each as the
    first, from what dataset and collator hold now and under one random state. So it is asked before any other row is
    read: who numbers labels as they come has a number for each by then. Of rows that fail nothing is said, nor where
    the same is another when all is done again: what draws it is for others to say.

    Args:
        dataset: as it was given.
        collate: what collates its rows, with what prepares its batches, where that is the user's.

    Raises:
        ConfigurationError: with the name of either.
    """
    n = len(dataset)
    places = sorted({int(n * (i * _SPREAD % 1)) for i in range(_ROWS)}) if n else []
    rows = _made_after_any(lambda i: dataset[i], places, list(_of_dataset(dataset)))
    if rows is None:
        its = ", by its transform," if isinstance(dataset, datasets.Dataset) else ""
        raise _refusal(f"{type(dataset).__name__}{its}")
    collated = _made_after_any(
        lambda i: collate.collated([copy.deepcopy(rows[i])]), list(rows), list(computing(collate.given))
    )
    if collated is None:
        raise _refusal(f"the data collator {collate.name}")


def left_as_it_was(dataset: Any) -> AbstractContextManager[None]:
    """What is read inside leaves nothing in a dataset, so that `check_order` can still see what it numbers."""
    return _put_back(list(_of_dataset(dataset)))


@contextmanager
def _put_back(holders: _Holders) -> Iterator[None]:
    """What is held is as it was, but for attributes that were nothing before: what is loaded stays so."""
    objects = [(holder, {**vars(holder)}) for _, holder in holders if isinstance(holder, torch.utils.data.Dataset)]
    with Held(holders).put_back():
        yield
        loaded = [
            (holder, name, value)
            for holder, before in objects
            for name, value in vars(holder).items()
            if before.get(name) is None and not isinstance(value, SCALARS)
        ]
    for holder, name, value in loaded:
        put(holder, name, value)


def _made_after_any(make: _Make, places: list[int], holders: _Holders) -> dict[int, Any] | None:
    """What is made at each of the `places`, where that does not fail; None where it is another at the first."""
    found, is_kept = _made(make, places, holders)

    def differs(again: dict[int, Any]) -> bool:
        return any(not is_alike(found[i], again[i], is_row=True) for i in found.keys() & again.keys())

    # What keeps nothing, as most do, need not be asked again.
    if is_kept and any(differs(_made(make, [i], holders)[0]) for i in found):
        return found if differs(_made(make, places, holders)[0]) else None
    return found


def _made(make: _Make, places: list[int], holders: _Holders) -> tuple[dict[int, Any], bool]:
    """And whether anything that is held was another then; it is put back."""
    found: dict[int, Any] = {}
    with _put_back(holders), unchanged_global_state():
        before = Held(holders).values
        for i in places:
            seed_global_state(0)
            try:
                # It may be the same object each time, and hold what came later.
                found[i] = copy.deepcopy(make(i))
            except Exception:  # noqa: BLE001 - what a row does by itself is for others to say
                continue
        now = Held(holders).values
        is_kept = any(not same(before.get(place, NOTHING), now.get(place, NOTHING)) for place in {**before, **now})
    return found, is_kept


def _of_dataset(dataset: Any) -> Iterator[tuple[str, Any]]:
    """What may keep something when a row is read: a transform, a dataset of Python's, and datasets that it holds."""
    if isinstance(dataset, datasets.Dataset):
        transform = (dataset.format.get("format_kwargs") or {}).get("transform")
        yield from computing(transform) if transform is not None else ()
    elif isinstance(dataset, torch.utils.data.Dataset):
        yield f"{type(dataset).__name__} {id(dataset)}", dataset
        for value in vars(dataset).values():
            for inner in value[:_HELD] if isinstance(value, (list, tuple)) else (value,):
                if isinstance(inner, torch.utils.data.Dataset | datasets.Dataset):
                    yield from _of_dataset(inner)


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} makes another row of an example when other rows came before it.",
        why="it keeps something of the rows that it has seen (a number for each label or word, in the order in which "
        "they come, a running mean or maximum), so one example more or less changes what becomes of all later ones.",
        fix="decide it beforehand and from what is public: a list of all labels, a tokenizer, constants to scale by; "
        "or for each row by itself.",
    )
