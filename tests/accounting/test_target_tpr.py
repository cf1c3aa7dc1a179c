"""Noise for a budget in the language of attacks: the smallest that keeps it, with all that is released besides."""

from __future__ import annotations

import math

import dp_accounting as dp
import pytest
from scipy import stats

from hf_dp import PrivacyConfig
from hf_dp.accounting import ExampleUnit, GaussianNoise, PoissonSampling, Share, calibrated, noise_for_tpr, step_event
from hf_dp.accounting.risk import risk
from hf_dp.errors import ConfigurationError


@pytest.mark.parametrize(("found", "wrong", "times"), [(0.05, 0.01, 1), (0.5, 0.1, 9), (0.02, 0.001, 1)])
def test_of_gaussian_noise_it_is_the_closed_form(found: float, wrong: float, times: int) -> None:
    """Dong, Roth and Su 2019, arXiv:1905.02383, section 2.3: TPR = cdf(ppf(FPR) + sqrt(times) / sigma)."""
    noise = noise_for_tpr(dp.GaussianDpEvent, target_tpr=found, at_fpr=wrong, steps=times)
    true = math.sqrt(times) / (stats.norm.ppf(found) - stats.norm.ppf(wrong))
    assert true <= noise <= true * 1.01


@pytest.mark.parametrize("spent", [None, dp.GaussianDpEvent(3.0)])
@pytest.mark.slow
def test_it_is_the_smallest_that_keeps_the_budget(spent: dp.DpEvent | None) -> None:
    noise = noise_for_tpr(lambda noise: step_event(noise, 0.2), target_tpr=0.05, at_fpr=0.01, steps=5, spent=spent)

    def found(noise: float) -> float:
        run = dp.SelfComposedDpEvent(step_event(noise, 0.2), 5)
        return risk(run if spent is None else dp.ComposedDpEvent([spent, run]), (0.01,)).true_positive_rates[0.01]

    assert found(noise * 0.997) > 0.05 >= found(noise)


@pytest.mark.slow
def test_other_releases_are_paid_for_from_the_same_budget() -> None:
    def step(noise: float) -> dp.DpEvent:
        sampling = PoissonSampling(probability=0.2, expected_batch_size=120)
        return sampling.event(GaussianNoise(multiplier=noise).event(), ExampleUnit(number=600))

    given = {"steps": 5, "delta": 1e-5, "target_tpr": 0.05, "at_fpr": 0.01}
    _, alone = calibrated(step, **given)
    (release,), noise = calibrated(step, shares=[Share("rows", 0.3, 2)], **given)
    released = dp.SelfComposedDpEvent(release.event, 2)
    whole = dp.ComposedDpEvent([released, dp.SelfComposedDpEvent(step(noise), 5)])
    assert noise > alone * 1.01
    assert risk(whole, (0.01,)).true_positive_rates[0.01] <= 0.05
    assert risk(released, (0.01,)).true_positive_rates[0.01] > 0.012


def test_a_release_beside_steps_that_may_tell_next_to_nothing_is_refused_in_words_of_attacks() -> None:
    given = {"steps": 1, "delta": 1e-3, "target_tpr": 0.010001, "at_fpr": 0.01}
    with pytest.raises(ConfigurationError, match="target_tpr=0.010001 at at_fpr=0.01, with a release of rows"):
        calibrated(lambda noise: step_event(noise, 1.0), shares=[Share("rows", 0.3, 1)], **given)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"target_tpr": 0.05, "target_epsilon": 8.0}, "noise_multiplier=None, with target_tpr=0.05"),
        ({"target_tpr": 0.05, "noise_multiplier": 1.0}, "noise_multiplier=1.0, with target_tpr=0.05"),
        ({"target_tpr": 0.01}, "target_tpr=0.01 at at_fpr=0.01"),
        ({"target_tpr": 1.0}, "target_tpr=1.0 at"),
        ({"target_tpr": 0.05, "at_fpr": 0.0}, "at at_fpr=0.0"),
        ({"target_tpr": 0.05, "at_fpr": 1e-9}, "at at_fpr=1e-09"),
        ({"target_epsilon": 8.0, "at_fpr": 0.1}, "at_fpr=0.1 without target_tpr"),
        ({"target_tpr": 0.05, "accountant": "rdp"}, "target_tpr=0.05 with accountant='rdp'"),
        ({"target_tpr": (0.01, 0.05)}, "target_tpr=(0.01, 0.05)"),
    ],
)
def test_what_is_no_budget_is_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        PrivacyConfig(**values)  # type: ignore[arg-type]
    assert words in str(refusal.value)


@pytest.mark.slow
def test_a_budget_that_nothing_keeps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no noise multiplier up to"):
        noise_for_tpr(lambda noise: dp.NonPrivateDpEvent(), target_tpr=0.05, at_fpr=0.01, steps=1)
    spent = dp.GaussianDpEvent(0.5)
    with pytest.raises(ConfigurationError, match="target_tpr=0.05 at at_fpr=0.01 with 3 steps"):
        noise_for_tpr(dp.GaussianDpEvent, target_tpr=0.05, at_fpr=0.01, steps=3, spent=spent)
