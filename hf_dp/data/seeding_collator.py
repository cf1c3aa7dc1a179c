"""For the check before the first step: does a collator seed the generators that it draws from for the rows behind?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_dp.randomness import GENERATORS, global_state, seed_global_state

_STATES = 16
# What was made of each of several copies of one row.
Copies = Sequence[Any]


def seeds_between_rows(collated: Sequence[Copies], again: Callable[[], Copies]) -> bool:
    """Whether copies behind the first are made by numbers from a generator that was seeded before their turn.

    The first copy follows from the state of a generator, no other one does, and it is left at the same from wherever it
    began. Who seeds for each row all that is drawn for it has a first row that follows from no state.

    Args:
        collated: the copies under several random states.
        again: makes them under the state that the global generators have.
    """
    first, *others = (set(copies) for copies in zip(*collated, strict=True))
    if len(first) == 1 or any(len(seen) > 1 for seen in others):
        return False
    left = []
    for state in range(_STATES):
        seed_global_state(state)
        again()
        left.append(global_state())
    # Of torch there are several, if there is CUDA.
    seeded = [place for place in range(-GENERATORS, 0) if len({state[place] for state in left}) == 1]
    return any(_is_first_moved_by(place, again) for place in seeded)


def _is_first_moved_by(place: int, again: Callable[[], Copies]) -> bool:
    found = set()
    for state in range(_STATES):
        seed_global_state(state, only=place)
        found.add(again()[0])
    return len(found) > 1
