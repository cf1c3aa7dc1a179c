"""What every sampler must keep: each kind has a class of tests that inherits these."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import dp_accounting as dp
import numpy as np
import pytest
import torch
from scipy import stats

from hf_dp.accounting import (
    ExampleUnit,
    GaussianNoise,
    Mechanism,
    SamplingTerms,
    epsilon,
    event_from_dict,
    event_to_dict,
    in_words,
)
from hf_dp.accounting.events import primitives
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.config import PrivacyConfig
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.loader import PoissonDataLoader
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.randomness import Entropy
from hf_dp.sampling.sampler import BatchSampler
from hf_dp.sampling.table import SAMPLERS, sampler_of
from hf_dp.step.plan import Plan
from tests.training.workbench import assert_resumes_as_it_was, private

# Seeds are fixed, so a right sampler passes always; a p-value below this says that the draws are wrong.
REJECTED = 1e-3
STEPS = 2000
SHAPES = [(240, 12), (240, 72), (240, 120), (24, 12), (240, 192)]


def drawn_by(sampler: BatchSampler) -> np.ndarray:
    """Which step (row) drew which example (column): (steps, n) of bool."""
    drawn = np.zeros((STEPS, sampler.dataset_size), dtype=bool)
    for step in range(STEPS):
        drawn[step, sampler.draw(step)] = True
    return drawn


def chi_square_p(statistic: float, degrees: int) -> float:
    return float(2 * min(stats.chi2.cdf(statistic, degrees), stats.chi2.sf(statistic, degrees)))


def normal_p(found: float, mean: float, variance: float) -> float:
    return float(2 * stats.norm.sf(abs(found - mean) / math.sqrt(variance)))


class Law:
    """Of batches in which all examples are alike: of their sizes alone.

    Args:
        sizes: the probability of each size from 0 to n.
    """

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes, self.n = sizes, len(sizes) - 1

    def mean(self, of: np.ndarray) -> float:
        """Of a number for each size."""
        return float(self.sizes @ of)

    @functools.cached_property
    def falling(self) -> list[np.ndarray]:
        """By k, the probability that k given examples are in a batch of each size."""
        s, n = np.arange(self.n + 1.0), float(self.n)
        terms = [(s - k) / (n - k) for k in range(4)]
        return [np.prod(terms[:k], axis=0).clip(0) if k else np.ones(self.n + 1) for k in range(5)]


def total_p(drawn: np.ndarray, law: Law) -> float:
    s = np.arange(law.n + 1.0)
    variance = law.mean(s**2) - law.mean(s) ** 2
    return normal_p(drawn.sum(), len(drawn) * law.mean(s), len(drawn) * variance)


def inclusion_p(drawn: np.ndarray, law: Law) -> float:
    """How far the examples' counts lie apart."""
    counts, (_, one, two, *_) = drawn.sum(axis=0), law.falling
    apart = ((counts - counts.mean()) ** 2).sum() / (len(drawn) * (law.mean(one) - law.mean(two)))
    return chi_square_p(float(apart), law.n - 1)


def size_p(drawn: np.ndarray, law: Law) -> float:
    """Chi-square over bins of sizes that are about equally likely."""
    below = np.cumsum(law.sizes)
    edges = np.unique(np.searchsorted(below, np.linspace(0, 1, 11)[1:-1]))
    expected = np.diff(np.concatenate([[0], below[edges], [1]]))
    observed = np.bincount(np.searchsorted(edges, drawn.sum(axis=1)), minlength=len(expected))
    if observed[expected < 1e-12].any():
        return 0.0
    kept = expected >= 1e-12
    return float(stats.chisquare(observed[kept], expected[kept] * len(drawn)).pvalue)


def step_overlap_p(drawn: np.ndarray, law: Law) -> float:
    """Examples common to steps 2k and 2k + 1."""
    both, s, n = (drawn[0::2] & drawn[1::2]).sum(axis=1), np.arange(law.n + 1.0), law.n
    # Of sizes s and t, hypergeometric: E = s t / n, Var = s t (n - s) (n - t) / (n^2 (n - 1)).
    mean = law.mean(s) ** 2 / n
    variance = law.mean(s * (n - s)) ** 2 / (n**2 * (n - 1)) + (law.mean(s**2) / n) ** 2 - mean**2
    return normal_p(both.sum(), len(both) * mean, len(both) * variance)


def neighbour_overlap_p(drawn: np.ndarray, law: Law) -> float:
    """Examples 2k and 2k + 1 in the same step."""
    both, pairs = (drawn[:, 0::2] & drawn[:, 1::2]).sum(axis=1), law.n // 2
    _, _, two, _, four = law.falling
    mean = pairs * law.mean(two)
    variance = mean + pairs * (pairs - 1) * law.mean(four) - mean**2
    return normal_p(both.sum(), len(both) * mean, len(both) * variance)


CHECKS = [total_p, inclusion_p, size_p, step_overlap_p, neighbour_overlap_p]


def least_p(drawn: np.ndarray, law: Law) -> float:
    return min(check(drawn, law) for check in CHECKS)


# --- what a step costs, by enumerating all draws -------------------------------------------------------------------

Draws = dict[tuple[int, ...], float]


def densities(draws: Draws, gradients: list[float], noise: float) -> np.ndarray:
    """Of the noisy sum of what is drawn, as probabilities of the cells of a grid."""
    x, width = np.linspace(-6 - 9 * noise, 6 + 9 * noise, 3001, retstep=True)
    means: dict[float, float] = {}
    for drawn, probability in draws.items():
        total = sum(gradients[i] for i in drawn)
        means[total] = means.get(total, 0.0) + probability
    return sum(p * stats.norm.pdf(x, mean, noise) for mean, p in means.items()) * width


def hockey_stick(one: np.ndarray, two: np.ndarray, eps: float) -> float:
    return float(np.maximum(one - math.exp(eps) * two, 0).sum())


def charged(event: dp.DpEvent, eps: float) -> tuple[float, float]:
    """The smallest delta that is charged for one use: of one unit less, and of one more."""
    (one,) = primitives(event) or ()
    cell, found = 1e-3, []
    for loss in one.losses(cell):
        losses = cell * (loss.lowest + np.arange(len(loss.masses)))
        found.append(float(loss.masses @ np.maximum(-np.expm1(eps - losses), 0)) + loss.infinite)
    return found[0], found[1]


EPSILONS = (0.0, 0.1, 0.5, 1.0, 2.0, 3.0)


def largest_share(draws: Draws, n: int, noise: float, event: dp.DpEvent) -> float:
    """The true delta over the one that is charged, at worst over gradients, directions and epsilons."""
    worst = 0.0
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), n - 1):
        whole, zeroed = (densities(draws, [mine, *others], noise) for mine in (1.0, 0.0))
        for eps in EPSILONS:
            bounds = charged(event, eps)
            for (one, two), bound in zip(((whole, zeroed), (zeroed, whole)), bounds, strict=True):
                # Below that the grid's own error shows.
                worst = max(worst, hockey_stick(one, two, eps) / max(bound, 1e-7))
    return worst


class SamplerContract:
    """A kind of sampling, from the promise to a resumed training.

    Attributes:
        kind: of the terms and the table.
        config: what asks for it in a config, for an expected batch of 8 of 48.
        written: its terms in JSON, of that batch.
    """

    kind: ClassVar[str]
    config: ClassVar[dict[str, Any]]
    written: ClassVar[dict[str, Any]]

    def terms(self, n: int, expected: float, factor: float = 1.0) -> SamplingTerms:
        """Those of a draw whose probability is wrong by `factor`."""
        raise NotImplementedError

    def sizes(self, n: int, expected: int) -> np.ndarray:
        """The law of the sizes that these terms promise, written down by hand: (n + 1,)."""
        raise NotImplementedError

    def draws(self) -> tuple[int, SamplingTerms, Draws]:
        """A few units, terms, and the probability of each draw, written down by hand."""
        raise NotImplementedError

    def sampler(self, n: int, expected: int, factor: float = 1.0) -> BatchSampler:
        return sampler_of(self.terms(n, expected, factor), n, Entropy(0))

    def plan(self, **changes: Any) -> Plan:
        config = PrivacyConfig(**{"noise_multiplier": 1.0, "seed": 0, **self.config, **changes})
        entropy = Entropy(config.seed)
        return Plan.make(config, sampler_of(terms_from_dict("sampling", self.written), 48, entropy), 10, entropy)

    @pytest.mark.parametrize(("n", "expected"), SHAPES)
    def test_it_draws_what_its_terms_say(self, n: int, expected: int) -> None:
        drawn, law = drawn_by(self.sampler(n, expected)), Law(self.sizes(n, expected))
        found = {check.__name__: check(drawn, law) for check in CHECKS}
        assert min(found.values()) > REJECTED, found

    @pytest.mark.parametrize(("n", "expected"), [(240, 12), (240, 72), (240, 120)])
    @pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
    def test_negative_control_a_wrong_probability_is_rejected(self, n: int, expected: int, factor: float) -> None:
        drawn = drawn_by(self.sampler(n, expected, factor))
        assert least_p(drawn, Law(self.sizes(n, expected))) < REJECTED

    def test_draws_depend_on_entropy_and_step_alone(self) -> None:
        sampler, again = self.sampler(240, 72), self.sampler(240, 72)
        backwards = [sampler.draw(step) for step in reversed(range(10))]
        assert [*again, *again, *again][:10] == backwards[::-1]
        assert [again.draw(step) for step in range(10)] == backwards[::-1]
        assert len({tuple(batch) for batch in backwards}) == 10
        other = sampler_of(sampler.terms, 240, Entropy(1))
        assert [other.draw(step) for step in range(10)] != backwards[::-1]
        for batch in backwards:
            assert batch == sorted(set(batch))
            assert all(type(index) is int and 0 <= index < 240 for index in batch)

    def test_neighbours_are_drawn_alike(self) -> None:
        """One example replaced by nothing, n the same: it is drawn where it was, and so are all others."""

        def items(values: list[float]) -> list[list[float]]:
            collate = LogicalBatchCollator(4, lambda rows: {"x": torch.tensor(rows)})
            loader = PoissonDataLoader(values, batch_sampler=self.sampler(48, 8), collate_fn=collate)
            return [[float(x) for micro in item["micro_batches"] for x in micro["x"]] for item in loader]

        values = [float(i + 1) for i in range(48)]
        zeroed = [0.0 if i == 5 else value for i, value in enumerate(values)]
        assert [[0.0 if x == 6 else x for x in item] for item in items(values)] == items(zeroed)
        assert any(0.0 in item for item in items(zeroed))

    def test_terms_go_to_json_and_back_and_nothing_else_is_read(self) -> None:
        plan = self.plan()
        assert isinstance(plan.sampler, SAMPLERS[self.kind])
        assert json.loads(json.dumps(plan.mechanism.to_dict()))["sampling"] == self.written
        assert Mechanism.from_dict(plan.mechanism.to_dict()) == plan.mechanism
        assert PrivacyConfig.from_json(plan.config.to_json()) == plan.config
        assert event_from_dict(json.loads(json.dumps(event_to_dict(plan.event)))) == plan.event
        assert f"{plan.sampler.sampling_probability:.4g}" in in_words(plan.event)
        for name in self.written:
            with pytest.raises(ConfigurationError, match="sampling"):
                terms_from_dict("sampling", {key: value for key, value in self.written.items() if key != name})
        for wrong in ({"probability": 0}, {"probability": 1.1}, {"expected_batch_size": "many"}, {"extra": 1},
                      {"expected_batch_size": math.inf}, {"kind": "other"}):  # fmt: skip
            with pytest.raises(ConfigurationError):
                terms_from_dict("sampling", {**self.written, **wrong})

    def test_a_step_costs_no_less_than_a_composition_by_hand(self) -> None:
        n, terms, draws = self.draws()
        assert sum(draws.values()) == pytest.approx(1, abs=1e-12)
        for noise in (0.7, 1.0, 2.0):
            event = terms.event(GaussianNoise(multiplier=noise).event(), ExampleUnit(number=n))
            assert largest_share(draws, n, noise, event) <= 1 + 1e-3
            # Negative control: charged as if there were twice as much noise.
            less = terms.event(GaussianNoise(multiplier=2 * noise).event(), ExampleUnit(number=n))
            assert largest_share(draws, n, noise, less) > 1.1

    def test_two_steps_cost_no_less_than_a_composition_by_hand(self) -> None:
        n, terms, draws = self.draws()
        event, delta = dp.SelfComposedDpEvent(terms.event(dp.GaussianDpEvent(1.0), ExampleUnit(number=n)), 2), 1e-3
        stated = epsilon(event, delta)
        for other in (-1.0, 0.0, 1.0):
            whole, zeroed = (densities(draws, [mine, *[other] * (n - 1)], 1.0) for mine in (1.0, 0.0))
            for one, two in ((whole, zeroed), (zeroed, whole)):
                both = hockey_stick(np.outer(one, one), np.outer(two, two), stated)
                assert both <= delta * (1 + 1e-3)

    def test_queries_of_one_sample_cost_one_gaussian(self) -> None:
        """Of each example a gradient and a count, with noise of their own: the precisions add."""
        (n, terms, draws), noises = self.draws(), (2.5, 1.5)
        x, width = np.linspace(-12, 12, 301, retstep=True)

        def both(mine: float, others: tuple[float, float]) -> np.ndarray:
            found = np.zeros((len(x), len(x)))
            for drawn, probability in draws.items():
                sums = [sum(mine if i == 0 else other for i in drawn) for other in others]
                one, two = (stats.norm.pdf(x, at, noise) * width for at, noise in zip(sums, noises, strict=True))
                found += probability * np.outer(one, two)
            return found

        def share(multiplier: float) -> float:
            event, worst = terms.event(dp.GaussianDpEvent(multiplier), ExampleUnit(number=n)), 0.0
            for others in ((0.0, 0.0), (1.0, 1.0), (-1.0, -1.0), (-1.0, 1.0), (0.0, 1.0)):
                whole, zeroed = both(1.0, others), both(0.0, others)
                for eps in EPSILONS[:-1]:
                    bounds = charged(event, eps)
                    for pair, bound in zip(((whole, zeroed), (zeroed, whole)), bounds, strict=True):
                        worst = max(worst, hockey_stick(*pair, eps) / max(bound, 1e-7))
            return worst

        assert share(math.fsum(noise**-2 for noise in noises) ** -0.5) <= 1 + 1e-3
        # Negative control: the first query alone.
        assert share(noises[0]) > 1.1

    @pytest.mark.slow
    @pytest.mark.usefixtures("checked_once")
    def test_a_resumed_training_is_the_uninterrupted_one_and_keeps_its_sampling(self, tmp_path: Path) -> None:
        others = (private(**other) for other in ({}, {"max_batch_size": 30}) if other != self.config)
        errors = (LedgerError, ConfigurationError)
        assert_resumes_as_it_was(tmp_path, private(**self.config), others, "max_batch_size", *errors)
