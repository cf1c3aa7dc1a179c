"""Lower bounds on epsilon from many trainings with and without one unit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dp.audit.given import Scores, check_numbers, checked, refused
from hf_dp.audit.intervals import least, most


@dataclass(frozen=True, kw_only=True)
class TwoWorlds:
    """What repeated trainings with and without one unit prove, with `confidence`: epsilon at `delta` is no smaller.

    Attributes:
        epsilon: the lower bound, in nats; 0 where there is none.
        delta: at which it holds.
        confidence: as of `OneRun`.
        members, others: trainings with and without it, of those that the bound is from.
        found: of the first, how many were told from the second by their score.
        wrong: of the second, how many were taken for the first.
        threshold: above which (below, where it is `of_those_without`) a score was taken for one of the first.
        of_those_without: whether "the first" are those without the unit.
    """

    epsilon: float
    delta: float
    confidence: float
    members: int
    others: int
    found: int
    wrong: int
    threshold: float
    of_those_without: bool


def two_worlds(with_: Scores, without: Scores, *, delta: float, confidence: float = 0.95) -> TwoWorlds:
    """A lower bound on epsilon from repeated trainings, one score of each, with a unit and without it.

    Threshold and direction are chosen on the scores at even places, and counted on the others. Both rates are bounded
    (Clopper and Pearson 1934) with half of 1 - confidence each: epsilon is at least log((found - delta) / wrong).

    Args:
        with_: scores of independent trainings with the unit.
        without: of trainings that are the same but for it.
        delta: of the claim, below 1.

    Raises:
        ConfigurationError: scores from which nothing could follow.
    """
    one, two = checked(with_, "with_"), checked(without, "without")
    check_numbers(delta, confidence)
    level = (1 - confidence) / 2
    halves = len(one) // 2, len(two) // 2
    if min(halves) < 1 or not _told_apart(halves[0], halves[0], 0, halves[1], delta, level) > 0:
        raise refused(
            f"{len(one)} trainings with the unit, and {len(two)} without",
            "a perfect attack on so few would prove nothing.",
            "train more often; 100 times each is a beginning.",
        )

    def bounds(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], threshold: Any) -> tuple[Any, Any, Any]:
        found, wrong = (len(scores) - np.searchsorted(np.sort(scores), threshold, side="right") for scores in (a, b))
        return found, wrong, _told_apart(found, len(a), wrong, len(b), delta, level)

    best: tuple[float, float, bool] = (-math.inf, math.inf, False)
    for turned in (False, True):
        first, second = (-two[::2], -one[::2]) if turned else (one[::2], two[::2])
        thresholds = np.unique(second)
        values = bounds(first, second, thresholds)[2]
        at = int(values.argmax())
        best = max(best, (float(values[at]), float(thresholds[at]), turned))
    _, threshold, turned = best
    first, second = (-two[1::2], -one[1::2]) if turned else (one[1::2], two[1::2])
    found, wrong, bound = (value[0] for value in bounds(first, second, np.array([threshold])))
    return TwoWorlds(
        epsilon=float(bound), delta=delta, confidence=confidence, members=len(first), others=len(second),
        found=int(found), wrong=int(wrong), threshold=-threshold if turned else threshold, of_those_without=turned,
    )  # fmt: skip


def _told_apart(found: Any, members: int, wrong: Any, others: int, delta: float, level: float) -> Any:
    """log((least share found - delta) / largest share taken wrongly), at least 0."""
    wrongly = most(wrong, others, level)
    return np.log(np.maximum(least(found, members, level) - delta, wrongly) / wrongly)
