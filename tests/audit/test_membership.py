"""Membership: AUC and rates against counting by hand, and intervals that hold as often as they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special, stats

from hf_dp.audit import membership
from hf_dp.audit.intervals import interval
from hf_dp.errors import ConfigurationError

CONFIDENCE, GAMES = 0.9, 300
Draw = Callable[[np.random.Generator], tuple[Any, Any]]


def test_auc_and_rates_are_what_counting_finds() -> None:
    rng = np.random.default_rng(0)
    # Rounded: many ties.
    members, others = np.round(rng.normal(0.7, size=90), 1), np.round(rng.normal(size=250), 1)
    found = membership(members, others)
    pairs = (members[:, None] > others).sum() + (members[:, None] == others).sum() / 2
    assert found.auc == pytest.approx(pairs / members.size / others.size)
    assert not found.by_chance
    assert found.at[0.001] is None
    at = found.at[0.01]
    assert at is not None
    assert (others > at.threshold).sum() == at.wrong <= 2
    # A lower threshold would take too many others for members.
    assert (others >= at.threshold).sum() > 2
    assert (members > at.threshold).sum() == at.found == at.true_positive_rate * 90
    exact = stats.binomtest(at.found, 90).proportion_ci(0.95, method="exact")
    assert at.true_positives == pytest.approx((exact.low, exact.high))


def test_a_thousand_others_are_needed_for_one_in_a_thousand() -> None:
    members = np.full(10, 2.0)
    assert membership(members, np.arange(999) / 999).at[0.001] is None
    at = membership(members, np.arange(1000) / 1000).at[0.001]
    assert at is not None
    assert (at.found, at.wrong) == (10, 1)
    # Their own rate is not known better than that.
    assert at.false_positives[1] > 0.005


def test_scores_all_alike_find_nobody_and_perfect_ones_all() -> None:
    alike = membership(np.zeros(300), np.zeros(300))
    assert alike.auc == 0.5
    assert alike.by_chance
    assert alike.at[0.01] is not None
    assert (alike.at[0.01].found, alike.at[0.01].wrong) == (0, 0)
    perfect = membership(np.ones(300), np.r_[np.zeros(299), -math.inf])
    assert perfect.auc == 1
    assert 0.98 < perfect.auc_interval[0] < perfect.auc_interval[1] == 1
    assert perfect.at[0.01] is not None
    assert perfect.at[0.01].true_positives == (perfect.auc_interval[0], 1)


def test_one_member_says_little_and_that_is_said() -> None:
    one = membership([5.0], np.arange(100.0) / 100)
    assert one.auc == 1
    assert one.auc_interval[0] < 0.05
    assert one.by_chance


def shifted(mu: float, members: int, others: int, decimals: int = 9) -> Draw:
    return lambda rng: (rng.normal(mu, size=members).round(decimals), rng.normal(size=others).round(decimals))


def half_known(members: int, others: int) -> Draw:
    """Half of the members are found for sure, the others not at all: the AUC varies most, and is 3/4."""
    return lambda rng: (np.where(rng.random(members) < 0.5, 9.0, rng.random(members)), rng.random(others))


def auc(mu: float) -> float:
    return float(special.ndtr(mu / math.sqrt(2)))


KNOWN: dict[str, tuple[Draw, float]] = {
    "nothing to find": (shifted(0, 60, 60), 0.5),
    "ties": (shifted(0, 60, 60, 0), 0.5),
    "found": (shifted(1, 60, 60), auc(1)),
    "nearly all found": (shifted(4, 60, 60), auc(4)),
    "few members": (shifted(1, 5, 500), auc(1)),
    "one member": (shifted(1, 1, 500), auc(1)),
    "half of them known": (half_known(60, 600), 0.75),
}


def misses(draw: Draw, truth: float, span: Callable[[Any, Any], tuple[float, float]], games: int) -> int:
    rng = np.random.default_rng(2)
    spans = [span(*draw(rng)) for _ in range(games)]
    return sum(not low <= truth <= high for low, high in spans)


def too_many(games: int) -> float:
    return float(stats.binom.isf(1e-4, games, 1 - CONFIDENCE))


@pytest.mark.parametrize("games", [GAMES, 20 * GAMES])
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.slow
def test_the_interval_of_an_auc_holds_it_as_often_as_it_says(name: str, games: int) -> None:
    draw, truth = KNOWN[name]
    span = lambda one, two: membership(one, two, confidence=CONFIDENCE).auc_interval  # noqa: E731
    assert misses(draw, truth, span, games) <= too_many(games)


@pytest.mark.slow
def test_an_interval_that_is_too_narrow_would_be_found_out() -> None:
    """The control: all pairs counted as if they were independent; and each side's own number, where members are few."""

    def of_all_pairs(one: Any, two: Any) -> tuple[float, float]:
        return interval(membership(one, two).auc * one.size * two.size, one.size * two.size, CONFIDENCE)

    def of_the_larger(one: Any, two: Any) -> tuple[float, float]:
        return interval(membership(one, two).auc * two.size, two.size, CONFIDENCE)

    assert misses(*KNOWN["nothing to find"], of_all_pairs, GAMES) > too_many(GAMES)
    assert misses(*KNOWN["half of them known"], of_the_larger, GAMES) > too_many(GAMES)


@pytest.mark.parametrize("decimals", [9, 1])
@pytest.mark.slow
def test_rates_at_a_threshold_lie_in_their_intervals(decimals: int) -> None:
    """The threshold is chosen by the same others."""
    rng = np.random.default_rng(3)
    outside = [0, 0]
    for _ in range(GAMES):
        at = membership(*shifted(1.5, 50, 200, decimals)(rng), confidence=CONFIDENCE).at[0.01]
        assert at is not None
        # Of rounded scores, those that are above it by half a step.
        above = at.threshold + (10.0**-decimals) / 2
        for which, (rate, (low, high)) in enumerate(
            ((special.ndtr(1.5 - above), at.true_positives), (special.ndtr(-above), at.false_positives))
        ):
            outside[which] += not low <= rate <= high
    assert max(outside) <= too_many(GAMES)


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (lambda: membership([0.0, math.nan], [1.0]), "members with 1 NaN"),
        (lambda: membership([0.0], [math.nan]), "others with 1 NaN"),
        (lambda: membership([], [1.0]), r"members with shape \(0,\)"),
        (lambda: membership([1.0], []), r"others with shape \(0,\)"),
        (lambda: membership([1.0], [1.0], confidence=1), "confidence=1"),
    ],
)
def test_scores_that_mean_nothing_are_refused(ask: Callable[[], Any], found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        ask()
