"""What an attacker can tell at most, beside closed forms, an integral of our own, and an attack that reaches it."""

from __future__ import annotations

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant as dp_pld
from scipy import stats

from hf_dp.accounting import step_event, truncated
from hf_dp.accounting.accountants import deltas, epsilon
from hf_dp.accounting.risk import FALSE_POSITIVE_RATES, Risk, risk
from hf_dp.errors import ConfigurationError, LedgerError

RUNS = {
    "one release": dp.GaussianDpEvent(1.0),
    "little noise": dp.GaussianDpEvent(0.4),
    "many steps": dp.SelfComposedDpEvent(dp.GaussianDpEvent(40.0), 900),
    "sampled": dp.SelfComposedDpEvent(step_event(0.8, 0.05), 40),
    "and a release": dp.ComposedDpEvent(
        [dp.GaussianDpEvent(8.0), dp.SelfComposedDpEvent(step_event(1.0, 0.2), 20)]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sigma", "times"), [(0.4, 1), (1.0, 1), (5.0, 1), (40.0, 900)])
def test_of_gaussian_noise_it_is_the_closed_form(sigma: float, times: int) -> None:
    """Dong, Roth and Su 2019, arXiv:1905.02383, section 2.3: mu = sqrt(times) / sigma."""
    found, mu = risk(dp.SelfComposedDpEvent(dp.GaussianDpEvent(sigma), times)), math.sqrt(times) / sigma
    for rate, most in found.true_positive_rates.items():
        true = stats.norm.cdf(stats.norm.ppf(rate) + mu)
        assert true <= most <= true * 1.01
    assert 0 <= found.advantage - (2 * stats.norm.cdf(mu / 2) - 1) < 1e-6
    assert found.posterior == (1 + found.advantage) / 2


def test_of_a_single_sampled_step_it_is_the_integral() -> None:
    """The best attack is by likelihood: it says "member" above a threshold."""
    q, sigma = 0.3, 0.7
    found = risk(step_event(sigma, q))
    for rate, most in found.true_positive_rates.items():
        threshold = stats.norm.isf(rate) * sigma
        true = (1 - q) * rate + q * stats.norm.sf((threshold - 1) / sigma)
        assert true <= most <= true * 1.01
    assert 0 <= found.advantage - q * (2 * stats.norm.cdf(1 / (2 * sigma)) - 1) < 1e-5


@pytest.mark.parametrize(("q", "sigma"), [(0.434, 0.607), (0.3, 0.7), (0.01, 1.0)])
def test_it_is_tight_in_the_direction_whose_loss_has_an_end_too(q: float, sigma: float) -> None:
    """Without a unit no likelihood ratio is above 1 / (1 - q)."""
    x, width = np.linspace(-9 * sigma, 1 + 9 * sigma, 400_001, retstep=True)
    zero, one = stats.norm.pdf(x, 0, sigma) * width, stats.norm.pdf(x, 1, sigma) * width
    epsilons = -math.log1p(-q) * np.array([0, 0.1, 0.5, 0.9])
    for found, (here, there) in zip(
        deltas(step_event(sigma, q), epsilons),
        (((1 - q) * zero + q * one, zero), (zero, (1 - q) * zero + q * one)), strict=True,
    ):  # fmt: skip
        true = np.array([np.maximum(here - math.exp(eps) * there, 0).sum() for eps in epsilons])
        assert (true * (1 - 1e-6) <= found).all()
        # Of one step the grid shows.
        assert (found <= true * 1.01 + 1e-2 * true[0]).all()


@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
def test_no_attack_on_truncated_batches_does_better() -> None:
    """Of three units one is kept, and the others point away from it; half the noise breaks the bound."""
    n, q, sigma, games, steps = 3, 0.5, 0.8, 50_000, 3
    found = risk(dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(sigma), n, q, 1), steps))
    kept = (1 - (1 - q) ** n) / n
    laws = {member: [(float(member), kept), (-1.0, 2 * kept), (0.0, 1 - 3 * kept)] for member in (True, False)}

    def log_density(x: np.ndarray, law: list[tuple[float, float]]) -> np.ndarray:
        return np.log(sum(p * np.exp(-((x - mean) ** 2) / 2 / sigma**2) for mean, p in law))

    def advantage(factor: float) -> float:
        rng, scores = np.random.default_rng(0), {}
        for member, law in laws.items():
            means, probabilities = zip(*law, strict=True)
            x = rng.choice(means, (games, steps), p=probabilities) + rng.normal(0, sigma * factor, (games, steps))
            scores[member] = (log_density(x, laws[True]) - log_density(x, laws[False])).sum(axis=1)
        return float(stats.ks_2samp(scores[True], scores[False]).statistic)

    assert 0.2 < advantage(1.0) < found.advantage < advantage(0.5)


def test_what_is_said_to_be_the_most_is_not_rounded_down() -> None:
    said = str(Risk({0.01: 0.010401}, 0.0002, 0.5001))
    assert "at most 1.05% of those that were" in said
    assert "at most 50.01% of all cases" in said
    # What a float cannot hold is no reason to say more.
    assert "at most 7.00% of those" in str(Risk({0.01: 0.07}, 0.1, 0.55))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.slow
def test_no_attack_by_likelihood_does_better(run: str) -> None:
    """200,000 games of either kind; with a third less noise in them the bound is broken, which shows that they can."""

    def broken(factor: float) -> bool:
        rng, games = np.random.default_rng(0), 200_000
        scores = {False: np.zeros(games), True: np.zeros(games)}
        for member, score in scores.items():
            for q, sigma, times in MECHANISMS[run]:
                # Likelihoods of the noise that is claimed, outcomes of the noise that is there.
                for _ in range(times):
                    drawn = rng.normal(0, sigma * factor, games) + (member * (rng.random(games) < q))
                    score += np.log1p(q * np.expm1((drawn - 0.5) / sigma**2))
        bounds = risk(RUNS[run]).true_positive_rates
        return any(
            stats.binomtest(
                int((scores[True] > np.quantile(scores[False], 1 - rate)).sum()), games, most, alternative="greater"
            ).pvalue < 1e-6
            for rate, most in bounds.items() if rate >= 0.01
        )  # fmt: skip

    assert not broken(1.0)
    assert broken(2 / 3)


MECHANISMS = {
    "one release": [(1.0, 1.0, 1)],
    "little noise": [(1.0, 0.4, 1)],
    "many steps": [(1.0, 40.0 / 30, 1)],
    "sampled": [(0.05, 0.8, 40)],
    "and a release": [(1.0, 8.0, 1), (0.2, 1.0, 20)],
}


@pytest.mark.parametrize("run", RUNS)
def test_it_is_the_same_curve_as_epsilon(run: str) -> None:
    for delta in (1e-2, 1e-5):
        at = epsilon(RUNS[run], delta)
        largest = max(float(one[0]) for one in deltas(RUNS[run], np.array([at])))
        assert delta * 0.999 < largest < delta * 1.02


def test_what_is_not_private_hides_nothing_and_nothing_gives_nothing_away() -> None:
    everything = Risk(dict.fromkeys(FALSE_POSITIVE_RATES, 1.0), 1.0, 1.0)
    assert risk(dp.NonPrivateDpEvent()) == everything
    assert risk(dp.GaussianDpEvent(1e-30)) == everything
    nothing = risk(dp.NoOpDpEvent())
    assert nothing.true_positive_rates == pytest.approx({rate: rate for rate in FALSE_POSITIVE_RATES})
    assert (nothing.advantage, nothing.posterior) == (0.0, 0.5)


@pytest.mark.slow
def test_more_steps_tell_more() -> None:
    found = [risk(dp.SelfComposedDpEvent(step_event(1.0, 0.05), n)) for n in (1, 10, 100, 1000)]
    for fewer, more in itertools.pairwise(found):
        assert fewer.advantage < more.advantage
        assert all(fewer.true_positive_rates[rate] < more.true_positive_rates[rate] for rate in FALSE_POSITIVE_RATES)


@pytest.mark.parametrize("rate", [0, 1, -0.1, math.nan, "1%", True])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigurationError, match="false positive rate"):
        risk(dp.GaussianDpEvent(1.0), (rate,))
    with pytest.raises(LedgerError, match="not known here"):
        risk(dp.LaplaceDpEvent(1.0))


@pytest.mark.few(2)
@pytest.mark.parametrize(("q", "sigma", "steps"), [(1.0, 2.0, 4), (0.05, 0.8, 40), (0.2, 1.0, 20)])
def test_it_is_what_another_library_finds(q: float, sigma: float, steps: int) -> None:
    """riskcal (Kulynych et al. 2024, arXiv:2407.02191), from a distribution that dp_accounting has composed."""
    analysis = pytest.importorskip("riskcal.analysis")
    accountant = dp_pld.PLDAccountant(value_discretization_interval=1e-3)
    composed = accountant.compose(dp.SelfComposedDpEvent(step_event(sigma, q), steps))._pld
    found = risk(dp.SelfComposedDpEvent(step_event(sigma, q), steps))
    for rate, most in found.true_positive_rates.items():
        other = 1 - float(analysis.get_beta_from_pld(composed, alpha=rate))
        assert other * 0.999 <= most <= other * 1.01
    assert found.advantage == pytest.approx(float(analysis.get_advantage_from_pld(composed)), rel=1e-3)
    assert 1 - found.posterior == pytest.approx(float(analysis.get_bayes_risk_from_pld(composed, prior=0.5)), rel=1e-3)
    # It would tell another mechanism.
    assert (
        1 - float(analysis.get_beta_from_pld(composed, alpha=0.01))
        < 0.98 * risk(dp.SelfComposedDpEvent(step_event(0.98 * sigma, q), steps)).true_positive_rates[0.01]
    )


def test_sentence_and_table_say_the_same_numbers() -> None:
    found = risk(dp.GaussianDpEvent(1.0))
    said, rows = str(found), found.rows()
    assert list(rows.values()) == ["1.84%", "9.24%", "38.92%", "38.30%", "69.15%"]
    assert "at most 9.24% of those that were; " in said
    assert "at most 69.15% of all cases" in said
