"""A plan: what runs is made from its mechanism, and all that is released is paid for from one budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import dp_accounting as dp
import pytest

from hf_dp.accounting import (
    FlatClipping,
    GaussianNoise,
    Ledger,
    PoissonSampling,
    Query,
    Share,
    TruncatedPoissonSampling,
    UncountedExampleUnit,
    epsilon,
    truncated,
)
from hf_dp.config import PrivacyConfig
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.sampling.sampler import BatchSampler
from hf_dp.sampling.truncated import TruncatedPoissonBatchSampler
from hf_dp.step.plan import Plan

SHARES = (Share("presence", 0.2, 1), Share("rows", 0.1, 3, 4))


def made(seed: int | None = None, **given: Any) -> Plan:
    entropy = Entropy(seed)
    config = PrivacyConfig(target_epsilon=4.0, clipping_norm=0.5, accountant="rdp", seed=seed)
    return Plan.make(config, PoissonBatchSampler.of(1000, 50, entropy), 10, entropy, **given)


def test_releases_of_several_parts_and_queries_are_paid_for_from_one_budget() -> None:
    plan = made(shares=SHARES, queries=[Query("counts", 2.0)])
    assert [(release.label, release.times, release.every) for release in plan.releases] == [
        ("presence", 1, None), ("rows", 3, 4)
    ]  # fmt: skip
    assert 3.98 < epsilon(plan.mechanism.event, plan.delta, "rdp") <= 4.0
    # Negative control: calibrated for one of the two, both cost more than was promised.
    for share in SHARES:
        less = dataclasses.replace(made(shares=[share]).mechanism, releases=plan.releases)
        assert epsilon(less.event, plan.delta, "rdp") > 4.0
    assert plan.noise_standard_deviation == plan.gradient_noise_multiplier * 0.5 > plan.noise_multiplier * 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": PoissonSampling(probability=0.04, expected_batch_size=50)},
        {"sampling": PoissonSampling(probability=0.05, expected_batch_size=49)},
    ],
)
def test_a_sampler_that_is_not_the_mechanisms_is_refused(change: dict[str, Any]) -> None:
    plan = made()
    other = dataclasses.replace(plan.mechanism, **change)
    with pytest.raises(ConfigurationError, match="what runs would not be what is accounted for"):
        Plan(plan.config, other, plan.sampler, plan.entropy)
    with pytest.raises(ConfigurationError, match="what runs would not be"):
        Plan(plan.config, plan.mechanism, plan.sampler, Entropy(3))
    # A claim that keeps n secret is the config's, the sampler's and the mechanism's, or nobody's.
    own = plan.config.replace(sampling_probability=0.05, target_delta=1e-6)
    sampler = PoissonBatchSampler.of(1000, 50, plan.entropy, sampling_probability=0.05)
    counted_by_nobody = dataclasses.replace(plan.mechanism, unit=UncountedExampleUnit(), delta=1e-6)
    for config, mechanism, drawing in (
        (own, plan.mechanism, plan.sampler),
        (own.replace(sampling_probability=0.04), counted_by_nobody, sampler),
        (plan.config, counted_by_nobody, sampler),
        (own, counted_by_nobody, plan.sampler),
    ):
        with pytest.raises(ConfigurationError, match="what runs would not be"):
            Plan(config, mechanism, drawing, plan.entropy)
    assert Plan(own, counted_by_nobody, sampler, plan.entropy).sampler is sampler
    assert made(seed=3).mechanism.reproducible


def rounded(plan: Plan, factor: float) -> Ledger:
    """That of a run whose noise another version calibrated."""
    ledger = Ledger({**plan.promise, "calibrated_noise_multiplier": plan.noise_multiplier * factor})
    for release in plan.releases:
        ledger.charge(dp.GaussianDpEvent(release.noise_multiplier * factor), release.label)
    return ledger


def test_a_ledger_whose_noise_is_another_rounding_is_gone_on_with_as_it_is() -> None:
    plan = made(shares=SHARES, queries=[Query("counts", 2.0)])
    ledger = rounded(plan, 1 + 1e-13)
    continued = plan.continuing(ledger)
    ledger.check_same_promise(continued.promise)
    assert {(made.label, made.event) for made in ledger.releases} == {(r.label, r.event) for r in continued.releases}
    assert continued.noise_multiplier == ledger.promise["calibrated_noise_multiplier"] != plan.noise_multiplier
    assert continued.sampler is plan.sampler
    assert continued.entropy is plan.entropy
    # What is another noise stays refused, and so does what is no number.
    for other in (rounded(plan, 1 - 1e-6), Ledger(), Ledger({"calibrated_noise_multiplier": "1"})):
        assert plan.continuing(other).mechanism == plan.mechanism
    with pytest.raises(LedgerError, match="calibrated_noise_multiplier"):
        rounded(plan, 1 - 1e-6).check_same_promise(plan.continuing(rounded(plan, 1 - 1e-6)).promise)


def test_a_release_of_another_kind_is_not_gone_on_with() -> None:
    plan = made(shares=SHARES[:1])
    same = dp.GaussianDpEvent(plan.releases[0].noise_multiplier)
    for event in (
        dp.NoOpDpEvent(),
        dp.NonPrivateDpEvent(),
        dp.PoissonSampledDpEvent(0.5, same),
        dp.SelfComposedDpEvent(same, 2),
        dp.ComposedDpEvent([same, dp.GaussianDpEvent(1.0)]),
    ):
        ledger = Ledger(plan.promise)
        ledger.charge(event, "presence")
        assert plan.continuing(ledger).releases == plan.releases


class Everyone(PoissonBatchSampler):
    """Says what `PoissonBatchSampler` says, and draws otherwise."""

    def draw(self, step: int) -> list[int]:
        return list(range(self.dataset_size))


@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
@pytest.mark.parametrize(
    ("kind", "cap", "promised"),
    [
        # Charged for a cap of one, which costs next to nothing, and drawn without it.
        (PoissonBatchSampler, 50, 50),
        (TruncatedPoissonBatchSampler, None, None),
        (TruncatedPoissonBatchSampler, 60, None),
        (TruncatedPoissonBatchSampler, 60, 70),
        (PoissonBatchSampler, None, 60),
        (Everyone, None, None),
    ],
)
def test_a_sampler_that_does_not_draw_what_its_terms_say_is_refused(
    kind: type[BatchSampler], cap: int | None, promised: int | None
) -> None:
    said: dict[str, Any] = {"probability": 0.05, "expected_batch_size": 50}
    terms = PoissonSampling(**said) if cap is None else TruncatedPoissonSampling(**said, max_batch_size=cap)
    config, entropy = PrivacyConfig(noise_multiplier=1.0, max_batch_size=promised), Entropy(None)
    with pytest.raises(ConfigurationError, match="what runs would not be"):
        Plan.make(config, kind(terms, 1000, entropy), 10, entropy)


@pytest.mark.parametrize(
    "change",
    [
        {"clipping": FlatClipping(norm=1.0)},
        {"noise": GaussianNoise(multiplier=0.9)},
        {"noise": GaussianNoise(multiplier=1.0, kind="chacha20")},
        {"delta": 1e-5},
    ],
)
def test_a_mechanism_that_is_not_the_configs_is_refused(change: dict[str, Any]) -> None:
    config, entropy = PrivacyConfig(noise_multiplier=1.0, clipping_norm=0.5, target_delta=1e-6), Entropy(None)
    plan = Plan.make(config, PoissonBatchSampler.of(1000, 50, entropy), 10, entropy)
    with pytest.raises(ConfigurationError, match="not those of the config"):
        Plan(config, dataclasses.replace(plan.mechanism, **change), plan.sampler, entropy)
