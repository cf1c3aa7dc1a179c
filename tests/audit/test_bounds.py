"""Lower bounds on epsilon: of mechanisms whose epsilon is known they are right as often as they say, and leaks show."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize, special, stats

from hf_dp.accounting import epsilon
from hf_dp.audit import epsilon_of_mu, gaussian_one_run, one_run, two_worlds
from hf_dp.audit.hypotheses import Gaussian
from hf_dp.errors import ConfigurationError

DELTA, CANARIES, AUDITS, CONFIDENCE = 1e-5, 1000, 30, 0.8
Draw = Callable[[np.random.Generator, np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def told(eps: float) -> Draw:
    """Randomised response: the coin itself with probability e^eps / (1 + e^eps)."""
    return lambda rng, coins: np.where(rng.random(len(coins)) < special.expit(eps), coins, ~coins).astype(float)


def moved(mu: float) -> Draw:
    return lambda rng, coins: mu * coins + rng.normal(size=len(coins))


def scores(draw: Draw, rng: np.random.Generator, m: int = CANARIES) -> tuple[Any, Any]:
    coins = rng.random(m) < 0.5
    found = draw(rng, coins)
    return found[coins], found[~coins]


def twice(draw: Draw, rng: np.random.Generator, m: int = CANARIES) -> tuple[Any, Any]:
    return draw(rng, np.ones(m, bool)), draw(rng, np.zeros(m, bool))


def epsilons(bound: Any, draw: Draw, games: Any = scores, audits: int = AUDITS, delta: float = DELTA) -> Any:
    rng = np.random.default_rng(1)
    return np.array([bound(*games(draw, rng), delta=delta, confidence=CONFIDENCE).epsilon for _ in range(audits)])


MU = 0.5
AT_MU = epsilon_of_mu(MU, DELTA)
KNOWN = {
    "one run, randomised response": (one_run, scores, told, 1.0, 1.0),
    "one run, Gaussian": (one_run, scores, moved, MU, AT_MU),
    "one run, Gaussian, mu": (gaussian_one_run, scores, moved, MU, AT_MU),
    "two worlds, randomised response": (two_worlds, twice, told, 1.0, 1.0),
    "two worlds, Gaussian": (two_worlds, twice, moved, MU, AT_MU),
}


@pytest.mark.parametrize("audits", [AUDITS, pytest.param(20 * AUDITS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KNOWN)
def test_a_bound_is_right_as_often_as_it_says_and_a_leakier_mechanism_is_exposed(name: str, audits: int) -> None:
    """Three times as leaky."""
    bound, games, draw, strength, known = KNOWN[name]
    wrong = int((epsilons(bound, draw(strength), games, audits) > known).sum())
    assert wrong <= stats.binom.isf(1e-4, audits, 1 - CONFIDENCE)
    exposed = int((epsilons(bound, draw(3 * strength), games, 5) > known).sum())
    assert exposed >= 3


def test_a_bound_that_claims_too_much_would_be_found_out() -> None:
    """The control of the test above: what is right more often than not is no bound."""

    def rate(included: Any, excluded: Any, delta: float, confidence: float) -> Any:
        right = (included > 0.5).sum() + (excluded < 0.5).sum()
        return SimpleNamespace(epsilon=special.logit(right / CANARIES))

    assert (epsilons(rate, told(1.0), audits=200) > 1.0).sum() > stats.binom.isf(1e-4, 200, 1 - CONFIDENCE)


def test_scores_that_know_nothing_prove_nothing_also_where_all_are_alike() -> None:
    for draw in (moved(0.0), lambda rng, coins: np.zeros(len(coins))):
        for bound in (one_run, gaussian_one_run):
            assert (epsilons(bound, draw) > 0).sum() <= stats.binom.isf(1e-4, AUDITS, 1 - CONFIDENCE)
        assert (epsilons(two_worlds, draw, twice, 10) > 0).sum() <= stats.binom.isf(1e-4, 10, 1 - CONFIDENCE)


def test_what_is_given_away_with_probability_delta_does_not_count() -> None:
    """All coins, with probability 1/1250: not pure, and (0, 1/1250)-DP, which audits at that delta do not exceed."""

    def draw(rng: np.random.Generator, coins: Any) -> Any:
        return coins.astype(float) if rng.random() < 1 / 1250 else rng.random(len(coins))

    assert (epsilons(one_run, draw, delta=1 / 1250) > 0).sum() <= stats.binom.isf(1e-4, AUDITS, 1 - CONFIDENCE)


@pytest.mark.parametrize(("m", "guesses", "right", "mu"), [(20, 12, 10, 0.6), (30, 30, 20, 0.3), (16, 8, 8, 1.2)])
def test_what_a_gaussian_mechanism_may_do_is_what_a_linear_program_finds(
    m: int, guesses: int, right: int, mu: float
) -> None:
    """The largest probability of so many right guesses, with tangents in place of the trade-off function."""
    p = np.arange(guesses + 1)
    rows, limits = [], []
    for at in special.ndtr(np.linspace(-6, 6, 120)):
        x = special.ndtri(at)
        slope = math.exp(-mu * x - mu * mu / 2)
        for c in range(1, guesses + 1):
            rows.append((p >= c) * p / m - slope * (p >= c - 1) * (guesses - p) / m)
            limits.append(special.ndtr(x + mu) - slope * at)
    found = optimize.linprog(-(p >= right).astype(float), rows, limits, np.ones((1, len(p))), [1.0], method="highs")
    most = -found.fun
    assert 0.01 < most < 0.9
    assert not Gaussian(m, guesses, right, most * 0.98).excludes(mu)
    assert Gaussian(m, guesses, right, most * 1.02).excludes(mu)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0])
def test_epsilon_of_mu_is_that_of_the_accountant(mu: float) -> None:
    import dp_accounting as dp

    assert epsilon_of_mu(mu, DELTA) == pytest.approx(epsilon(dp.GaussianDpEvent(1 / mu), DELTA), rel=2e-3)
    assert epsilon_of_mu(0.0, DELTA) == 0


def test_all_right_is_what_coins_would_have_to_do() -> None:
    found = one_run(np.ones(500), np.zeros(500), delta=0.0)
    assert found.right == found.guesses == 1000
    # All of them right with probability (1 - 0.95) / tried, at the bound.
    assert special.expit(found.epsilon) ** found.guesses == pytest.approx(0.05 / found.tried, rel=1e-6)
    assert found.again() == found
    with_mu = gaussian_one_run(np.ones(500), np.zeros(500), delta=DELTA)
    assert with_mu.again() == with_mu


NOTHING: list[tuple[Any, str]] = [
    (lambda: one_run([0.0, math.nan] * 50, [1.0] * 100, delta=0.0), "included with 50 NaN"),
    (lambda: one_run([1.0] * 100, [], delta=0.0), r"excluded with shape \(0,\)"),
    (lambda: one_run([1.0] * 4, [0.0] * 4, delta=0.0), "^8 canaries"),
    (lambda: one_run([1.0] * 900, [0.0] * 100, delta=0.0), "900 canaries included and 100 excluded"),
    (lambda: one_run([1.0] * 50, [0.0] * 50, delta=0.01), "delta=0.01 with 100 canaries"),
    (lambda: one_run([1.0] * 50, [0.0] * 50, delta=0.0, confidence=0.5), "confidence=0.5"),
    (lambda: gaussian_one_run([1.0] * 50, [0.0] * 50, delta=0), "delta=0 of a Gaussian mechanism"),
    (lambda: two_worlds([1.0] * 9, [0.0] * 9, delta=0.0), "9 trainings with the unit, and 9 without"),
    (lambda: two_worlds([1.0], [math.nan], delta=0.0), "without with 1 NaN"),
]


@pytest.mark.parametrize(("ask", "found"), NOTHING)
def test_what_nothing_could_follow_from_is_refused(ask: Callable[[], Any], found: str) -> None:
    with pytest.raises(ConfigurationError, match=found):
        ask()
