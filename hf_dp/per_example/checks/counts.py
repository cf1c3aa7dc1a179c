"""Numbers that count passes, and what they may become."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.state import named_place
from hf_dp.per_example.checks.values import BIG, FAILED, SERIES, copied_within, of_kind, same

# Beyond what any training counts, and 0 by most numbers that something is done every so many times: by all up to 16,
# and by 50, 100 and 1000.
_MANY = 18_018_000
# What comes of a number that rose, and of one that fell: what did so with a few rows may go on, or back, with others.
_ENDS = ((_MANY, 0), (_MANY - 1, -_MANY), (-_MANY, _MANY), (-_MANY, _MANY - 1))
# By so much less where what is computed fails: of a mean that a sum is divided by, say, the exponential.
_LESS = (1, 1_000, 50_000)
# Of series so many items, if they can be copied: the first beyond what is waited for.
_LENGTHS = (12_600, 1_260, 126)
_SERIES = (*SERIES, set)


class Others(NamedTuple):
    """What may come in the place of a value.

    Attributes:
        tries: of which the first is meant that anything can be computed with.
        may_fail: whether nothing is said where that is none, or losses follow from it.
    """

    tries: list[Any]
    may_fail: bool = False


def all_alike(others: Iterable[Others], is_alike: Callable[[Any], bool | None]) -> bool:
    """Whether losses are the same with each of the `others`, by `is_alike`: None where that cannot be computed."""
    for tries, may_fail in others:
        answers = (answer for one in tries if (answer := is_alike(one)) is not None)
        if not next(answers, may_fail):
            return False
    return True


def refuse_counts(
    found: Mapping[tuple[str, Any], tuple[Any, Any]],
    are_alike: Callable[[tuple[str, Any], Any, list[Others]], bool],
) -> None:
    """Refuses counts that losses follow from, however many passes later.

    Args:
        found: by place, what a batch has left there, and what it left when it passed once more: nothing else than
            before is a cache, say.
        are_alike: whether losses are the same with the value in this place as with all of the others.

    Raises:
        UnsupportedModelError: with the name of one.
    """
    for place, (left, again) in found.items():
        if same(again, left) or are_alike(place, left, many(left, again)):
            continue
        raise UnsupportedModelError(
            f"{named_place(place)} counts the passes through the model, or their examples, and losses follow from how "
            "many there were.",
            why="how many a step takes follows from the examples that were drawn: one more could change the gradients "
            "of all that come after it.",
            fix="count the optimizer's steps instead, in a callback, or leave it as it is in training.",
        )


def many(was: Any, now: Any) -> list[Others]:
    """What may come, in a long training, of what was the one and is the other: of numbers what is beyond any count, as
    it is read and one pass before, as far below nothing, and, of those that fall, nothing; of a series one of very many
    items, or of none. Nothing of what counts nothing.

    A sum of parts may be too much for what is computed of it, beside a count that is still small: less of it is tried
    then. What only rose is below nothing where others lower it; of a logarithm of it that says nothing.
    """
    if isinstance(now, _SERIES):
        return _of_lengths(was, now)
    found: list[Others] = []
    for rising, falling in _ENDS:
        with suppress(*FAILED):  # these are no numbers
            sizes = (1,) if _is_whole(now) else _LESS
            tries = [_at_ends(was, now, rising // size, falling // size) for size in sizes]
            only_rose = same(tries[0], _at_ends(was, now, rising, 0))
            if not any(same(tries[0], known) for known in (now, *(others.tries[0] for others in found))):
                found.append(Others(tries, rising < 0 and only_rose))
    return found


def _is_whole(now: Any) -> bool:
    if isinstance(now, (Tensor, np.ndarray)):
        return math.prod(now.shape) > 1 or _is_whole(now.item())
    return bool(now % 1 == 0)


def _at_ends(was: Any, now: Any, rising: int, falling: int) -> Any:
    """`now`, with `rising` for each number that is more than it `was`, and `falling` for each that is less.

    Of several numbers only if all are whole: others are what a pass computes, of which there may be much.
    """
    if isinstance(now, (np.ndarray, np.generic)):
        before = torch.as_tensor(was) if isinstance(was, (np.ndarray, np.generic)) else was
        return _at_ends(before, torch.as_tensor(now), rising, falling).numpy().astype(now.dtype)[()]
    if isinstance(now, Tensor):
        now = now.detach()
        if now.is_complex() or now.layout is not torch.strided or (now.numel() > 1 and not now.equal(now.round())):
            return now
        limits = torch.finfo(now.dtype) if now.is_floating_point() else torch.iinfo(now.dtype)
        before = was.to(now) if isinstance(was, Tensor) and was.shape == now.shape else torch.zeros_like(now)
        ends = [min(max(end, limits.min), limits.max) for end in (rising, falling)]
        return now.masked_fill(now > before, ends[0]).masked_fill(now < before, ends[1])
    before = was if isinstance(was, (int, float, Decimal, Fraction)) else 0
    if isinstance(now, bool) or not (now > before or now < before):
        return now
    return type(now)(rising if now > before else falling)


def _of_lengths(was: Any, now: Any) -> list[Others]:
    before = was if isinstance(was, _SERIES) else type(now)()
    if len(now) == len(before):
        return [] if isinstance(now, set) else _of_items(before, now)
    # Of other tuples the length is part of what they are, as of shapes.
    if isinstance(now, tuple) and not (type(now) is type(was) is tuple and was):
        return []
    if len(now) < len(before):
        return [Others([of_kind(now, ())])]
    for most in _LENGTHS:
        with suppress(*FAILED):  # names cannot be made of numbers
            items = [now | {*map(type(next(iter(now))), range(n))} if isinstance(now, set) else islice(cycle(now), n)
                     for n in (most, most - 1)]  # fmt: skip
            found = [of_kind(now, several) for several in items]
            if copied_within(found[0]) is not BIG:
                return [Others([one]) for one in found]
    return []


def _of_items(was: Any, now: Any) -> list[Others]:
    """With what each of its numbers may become, all at once."""
    each, found = [many(*two) for two in zip(was, now, strict=True)], list[Others]()
    for i in range(max(map(len, each), default=0)):
        those = [
            others[i] if i < len(others) else Others([one], may_fail=True)
            for one, others in zip(now, each, strict=True)
        ]
        deepest = max(len(one.tries) for one in those)
        tries = [of_kind(now, [one.tries[min(k, len(one.tries) - 1)] for one in those]) for k in range(deepest)]
        found.append(Others(tries, all(one.may_fail for one in those)))
    return found
