"""Truncated Poisson sampling: of more than B that are drawn, B are kept, each subset as likely."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats
from torch import nn

from hf_dp import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting import (
    ExampleUnit,
    TruncatedPoissonSampling,
    epsilon,
    has_renyi,
    sampling_terms,
    step_event,
    truncated,
)
from hf_dp.accounting.truncated import Truncated
from hf_dp.data.loader import RankSampler
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.sampling.table import sampler_of
from hf_dp.training.run import Run
from tests.sampling.contract import (
    REJECTED,
    Draws,
    Law,
    SamplerContract,
    charged,
    densities,
    drawn_by,
    hockey_stick,
    inclusion_p,
    least_p,
    size_p,
)
from tests.training.workbench import EXPECTED, MICRO, classifier, make, private, with_lora

needs_the_event = pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")


def cap_of(expected: float) -> int:
    """Half a standard deviation above: a third of the draws is cut."""
    return math.ceil(expected + math.sqrt(expected) / 2)


@needs_the_event
class TestTruncated(SamplerContract):
    kind: ClassVar[str] = "truncated_poisson"
    config: ClassVar[dict[str, Any]] = {"max_batch_size": 10}
    written: ClassVar[dict[str, Any]] = {
        "probability": 8 / 48, "expected_batch_size": 8, "max_batch_size": 10, "kind": "truncated_poisson"
    }  # fmt: skip

    def terms(self, n: int, expected: float, factor: float = 1.0) -> TruncatedPoissonSampling:
        q = min(1.0, factor * expected / n)
        return TruncatedPoissonSampling(
            probability=q, expected_batch_size=expected, max_batch_size=min(n, cap_of(expected))
        )

    def sizes(self, n: int, expected: int) -> np.ndarray:
        sizes, most = stats.binom.pmf(np.arange(n + 1), n, expected / n), min(n, cap_of(expected))
        sizes[most], sizes[most + 1 :] = sizes[most:].sum(), 0
        return sizes

    def draws(self) -> tuple[int, TruncatedPoissonSampling, Draws]:
        n, q, most = 4, 0.4, 2
        found: Draws = {}
        for flips in itertools.product((0, 1), repeat=n):
            drawn = [i for i in range(n) if flips[i]]
            kept = list(itertools.combinations(drawn, min(most, len(drawn))))
            for each in kept:
                chance = q ** len(drawn) * (1 - q) ** (n - len(drawn)) / len(kept)
                found[each] = found.get(each, 0.0) + chance
        return n, TruncatedPoissonSampling(probability=q, expected_batch_size=n * q, max_batch_size=most), found

    @pytest.mark.parametrize(("n", "expected"), [(240, 12), (240, 120)])
    def test_negative_control_no_truncation_is_rejected(self, n: int, expected: int) -> None:
        drawn = drawn_by(PoissonBatchSampler.of(n, expected, Entropy(0)))
        assert size_p(drawn, Law(self.sizes(n, expected))) < REJECTED

    @pytest.mark.parametrize(("n", "expected"), [(240, 12), (240, 120)])
    def test_negative_control_to_keep_the_first_is_rejected(self, n: int, expected: int) -> None:
        drawn, law = drawn_by(PoissonBatchSampler.of(n, expected, Entropy(0))), Law(self.sizes(n, expected))
        drawn &= drawn.cumsum(axis=1) <= cap_of(expected)
        assert size_p(drawn, law) > REJECTED
        assert inclusion_p(drawn, law) < REJECTED

    def test_negative_control_to_keep_nothing_of_a_large_draw_is_rejected(self) -> None:
        drawn = drawn_by(PoissonBatchSampler.of(240, 12, Entropy(0)))
        drawn[drawn.sum(axis=1) > cap_of(12)] = False
        assert least_p(drawn, Law(self.sizes(240, 12))) < REJECTED

    def test_small_draws_are_those_of_poisson_sampling(self) -> None:
        plain, most = PoissonBatchSampler.of(240, 12, Entropy(0)), cap_of(12)
        for step in range(200):
            drawn, kept = plain.draw(step), self.sampler(240, 12).draw(step)
            assert kept == drawn if len(drawn) <= most else set(kept) < set(drawn) and len(kept) == most

    @pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 4), (3, 1)])
    def test_no_rank_has_more_micro_batches_than_fit_the_cap(self, ranks: int, micro: int) -> None:
        sampler = self.sampler(240, 12)
        shares = [RankSampler(sampler, rank, ranks) for rank in range(ranks)]
        for step in range(200):
            for share in shares:
                assert math.ceil(len(share.share(sampler.draw(step))) / micro) <= math.ceil(cap_of(12) / ranks / micro)
            assert sum(len(sampler.draw(step)[rank::ranks]) for rank in range(ranks)) <= cap_of(12)

    def test_to_charge_it_as_poisson_sampling_would_be_untrue(self) -> None:
        """All others alike: where the batch is full, the one example takes the place of another."""
        n, terms, draws = self.draws()
        whole, zeroed = (densities(draws, [mine, 1.0, 1.0, 1.0], 2.0) for mine in (1.0, 0.0))
        true, plain = hockey_stick(zeroed, whole, 0.4), charged(step_event(2.0, terms.probability), 0.4)[1]
        assert true > 3 * plain
        assert true <= charged(terms.event(dp.GaussianDpEvent(2.0), ExampleUnit(number=n)), 0.4)[1]


@needs_the_event
def test_the_probabilities_are_those_of_all_draws() -> None:
    n, q, most = 5, 0.3, 2
    one, full, kept = Truncated(n, q, most, 1.0), 0.0, 0.0
    for flips in itertools.product((0, 1), repeat=n):
        chance, others = math.prod(q if flip else 1 - q for flip in flips), sum(flips[1:])
        if others >= most:
            full += chance
            kept += chance * flips[0] * most / (others + 1)
    assert one.full == pytest.approx(full, rel=1e-12)
    assert one.kept == pytest.approx(kept / full, rel=1e-12)


@pytest.mark.few(1)
@needs_the_event
@pytest.mark.parametrize(
    ("noise", "q", "most"), [(1.0, 0.01, 30), pytest.param(0.7, 0.05, 60, marks=pytest.mark.slow), (2.0, 0.5, 530)]
)
def test_what_is_composed_is_the_pair_by_hand(noise: float, q: float, most: int) -> None:
    """Poisson where the batch is not full, else 0 or 2 against 0 or -2; the same under zero-out and add-or-remove."""
    one = Truncated(1000, q, most, noise)
    x, width = np.linspace(-4 - 12 * noise, 4 + 12 * noise, 200_001, retstep=True)
    normal = {mean: stats.norm.pdf(x, mean, noise) * width for mean in (-2, 0, 1, 2)}
    plain = (1 - q) * normal[0] + q * normal[1]
    up, down = ((1 - one.kept) * normal[0] + one.kept * normal[mean] for mean in (2, -2))
    for eps in (0.0, 0.3, 1.0, 2.0):
        replaced = hockey_stick(up, down, eps)
        by_hand = [
            (1 - one.full) * hockey_stick(*pair, eps) + one.full * replaced
            for pair in ((plain, normal[0]), (normal[0], plain))
        ]
        assert charged(one.event, eps) == pytest.approx(by_hand, rel=1e-3, abs=1e-9)
    relations = (dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_SPECIAL)
    run = dp.SelfComposedDpEvent(one.event, 10)
    found = [dp.pld.PLDAccountant(relation, 1e-3).compose(run).get_epsilon(1e-5) for relation in relations]
    assert found[0] == found[1] == pytest.approx(epsilon(run, 1e-5), rel=1e-2)


@needs_the_event
@pytest.mark.slow
def test_a_cap_that_no_draw_reaches_costs_nothing() -> None:
    plain = epsilon(dp.SelfComposedDpEvent(step_event(0.8, 0.01), 100), 1e-5)

    def capped(most: int) -> float:
        return epsilon(dp.SelfComposedDpEvent(Truncated(20_000, 0.01, most, 0.8).event, 100), 1e-5)

    # At 1000 others are fewer with probability 1 - 1e-400, which is no float.
    assert capped(20_000) == capped(10**6) == capped(1000) == pytest.approx(plain, rel=1e-9)
    # Five standard deviations, as a refusal suggests, cost next to nothing; and none costs less than nothing.
    assert plain <= capped(271) * (1 + 1e-9) < 1.005 * plain
    assert capped(256) > 1.05 * plain
    assert capped(220) > 2 * capped(256)


@needs_the_event
@pytest.mark.parametrize("most", range(380, 460, 5))
def test_a_cap_so_far_away_that_floats_end_has_an_epsilon(most: int) -> None:
    """Its probabilities have few digits, or none: from 1e-300 to 0."""
    found = epsilon(dp.SelfComposedDpEvent(Truncated(2000, 0.02, most, 0.8).event, 10), 1e-5)
    assert found == pytest.approx(epsilon(dp.SelfComposedDpEvent(step_event(0.8, 0.02), 10), 1e-5), rel=1e-9)


@needs_the_event
def test_it_composes_with_other_events_and_has_no_renyi_divergence() -> None:
    steps = dp.SelfComposedDpEvent(Truncated(1000, 0.05, 60, 1.0).event, 20)
    both = dp.ComposedDpEvent([step_event(5.0, 1.0), steps])
    assert epsilon(steps, 1e-5) < epsilon(both, 1e-5) < epsilon(steps, 1e-5) + epsilon(step_event(5.0, 1.0), 1e-5)
    assert (has_renyi(both), has_renyi(step_event(1.0, 0.1))) == (False, True)
    with pytest.raises(ConfigurationError, match="accountant='rdp' for batches with a hard cap"):
        epsilon(both, 1e-5, "rdp")
    assert epsilon(Truncated(1000, 0.05, 60, 0.0).event, 1e-5) == math.inf
    assert epsilon(Truncated(1000, 0.0, 60, 0.5).event, 1e-5) == 0


@needs_the_event
@pytest.mark.parametrize(
    "wrong",
    [{"dataset_size": 0}, {"truncated_batch_size": 0}, {"truncated_batch_size": 2.5}, {"sampling_probability": 1.5},
     {"sampling_probability": math.nan}, {"noise_multiplier": -1.0}, {"dataset_size": "many"}],
)  # fmt: skip
def test_an_event_with_numbers_that_are_none_is_refused(wrong: dict[str, Any]) -> None:
    values = {"dataset_size": 9, "sampling_probability": 0.5, "truncated_batch_size": 4, "noise_multiplier": 1.0}
    assert truncated.EVENT is not None
    with pytest.raises(LedgerError, match="is not known here"):
        epsilon(truncated.EVENT(**{**values, **wrong}), 1e-5)


def test_with_an_older_dp_accounting_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(truncated, "EVENT", None)
    with pytest.raises(ConfigurationError, match=r"(?s)max_batch_size=10 with dp-accounting.*dp-accounting>=0\.6"):
        make(tmp_path, privacy=private(max_batch_size=10))


@needs_the_event
@pytest.mark.parametrize("most", [EXPECTED - 1, 1])
def test_a_cap_below_the_expected_batch_is_refused_before_anything(most: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s)max_batch_size={most} below the expected batch size of 8.*=23"):
        make(tmp_path, privacy=private(max_batch_size=most))
    assert make(tmp_path, privacy=private(max_batch_size=EXPECTED)) is not None


@pytest.mark.parametrize("most", [0, -1, 2.5, "many", True, math.inf])
def test_a_cap_that_is_no_number_is_refused(most: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_batch_size="):
        PrivacyConfig(target_epsilon=1, max_batch_size=most)


def test_the_renyi_accountant_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="max_batch_size=10 with accountant='rdp'"):
        PrivacyConfig(target_epsilon=1, max_batch_size=10, accountant="rdp")


def test_promise_and_report_without_a_cap_do_not_name_it() -> None:
    terms = sampling_terms(48, 8, private().to_dict())
    assert (terms.kind, terms.name) == ("poisson", "Poisson")
    assert sampler_of(terms, 48, Entropy(0)).draw(3) == PoissonBatchSampler.of(48, 8, Entropy(0)).draw(3)


@needs_the_event
@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (classifier, {}),
        (with_lora, {}),
        (classifier, {"sparse_embeddings": SparseEmbeddingConfig(threshold=2.0)}),
        (classifier, {"re_attention": ReAttentionConfig()}),
    ],
    ids=["plain", "LoRA", "sparse embeddings", "Re-Attention"],
)
@pytest.mark.slow
def test_a_training_keeps_its_budget_and_its_cap(
    tmp_path: Path, model: Callable[[], nn.Module], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    privacy = PrivacyConfig(target_epsilon=3.0, max_batch_size=9, **settings)
    trainer = make(tmp_path, model(), privacy, max_steps=12)
    seen, take = [], Run.step

    def step(run: Run, item: dict[str, Any]) -> Any:
        seen.append([len(micro["input_ids"]) for micro in item["micro_batches"]])
        return take(run, item)

    monkeypatch.setattr(Run, "step", step)
    trainer.train()
    report = trainer.privacy_report()
    assert report.private
    assert 2.98 < report.epsilon <= 3.0
    assert (report.sampling, report.epsilon_rdp) == ("Poisson before truncation to 9", None)
    assert "RDP" not in str(report)
    assert max(map(sum, seen)) == 9
    assert max(map(len, seen)) <= math.ceil(9 / MICRO)
    assert len(seen) == report.steps == 12
