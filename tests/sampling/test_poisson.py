"""Poisson sampling: each example by itself. Every check must also reject samplers that are wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import stats

from hf_dp.accounting import PoissonSampling
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from tests.sampling.contract import (
    CHECKS,
    REJECTED,
    STEPS,
    Draws,
    Law,
    SamplerContract,
    chi_square_p,
    drawn_by,
    neighbour_overlap_p,
    size_p,
    step_overlap_p,
    total_p,
)


class TestPoisson(SamplerContract):
    kind: ClassVar[str] = "poisson"
    config: ClassVar[dict[str, Any]] = {}
    written: ClassVar[dict[str, Any]] = {"probability": 8 / 48, "expected_batch_size": 8, "kind": "poisson"}

    def terms(self, n: int, expected: float, factor: float = 1.0) -> PoissonSampling:
        return PoissonSampling(probability=factor * expected / n, expected_batch_size=expected)

    def sizes(self, n: int, expected: int) -> np.ndarray:
        return stats.binom.pmf(np.arange(n + 1), n, expected / n)

    def draws(self) -> tuple[int, PoissonSampling, Draws]:
        n, q = 4, 0.4
        drawn = [tuple(i for i in range(n) if flips[i]) for flips in itertools.product((0, 1), repeat=n)]
        return n, self.terms(n, n * q), {each: q ** len(each) * (1 - q) ** (n - len(each)) for each in drawn}


def poisson(n: int, expected: int) -> np.ndarray:
    return drawn_by(PoissonBatchSampler.of(n, expected, Entropy(0)))


def binomial(n: int, expected: int) -> Law:
    return Law(stats.binom.pmf(np.arange(n + 1), n, expected / n))


def fixed_size(n: int, expected: int) -> np.ndarray:
    """Exactly the expected number at every step, uniformly."""
    generator = np.random.default_rng(0)
    drawn = np.zeros((STEPS, n), dtype=bool)
    for row in drawn:
        row[generator.choice(n, expected, replace=False)] = True
    return drawn


def shuffled(n: int, expected: int) -> np.ndarray:
    """A permutation per epoch, cut into batches."""
    generator = np.random.default_rng(0)
    drawn = np.zeros((STEPS, n), dtype=bool)
    for step, row in enumerate(drawn):
        if step % (n // expected) == 0:
            order = generator.permutation(n)
        start = step % (n // expected) * expected
        row[order[start : start + expected]] = True
    return drawn


def in_pairs(n: int, expected: int) -> np.ndarray:
    """Neighbours are drawn together, each with the right probability."""
    halves = poisson(n // 2, expected // 2)
    return halves.repeat(2, axis=1)


@pytest.mark.few(10)
@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ != "inclusion_p"])
@pytest.mark.parametrize(("n", "expected"), [(240, 12), (240, 72), (240, 120)])
@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_negative_control_each_check_rejects_a_wrong_probability(
    check: Callable[[np.ndarray, Law], float], n: int, expected: int, factor: float
) -> None:
    assert check(poisson(n, round(expected * factor)), binomial(n, expected)) < REJECTED


def test_negative_control_examples_that_are_not_alike_are_rejected() -> None:
    """The first half a tenth more often, the second as much less."""
    drawn = np.random.default_rng(0).random((STEPS, 240)) < np.repeat([0.33, 0.27], 120)
    (inclusion_p,) = (check for check in CHECKS if check.__name__ == "inclusion_p")
    assert inclusion_p(drawn, binomial(240, 72)) < REJECTED < total_p(drawn, binomial(240, 72))


@pytest.mark.parametrize("wrong", [fixed_size, shuffled])
@pytest.mark.parametrize(("n", "expected"), [(240, 12), (240, 80), (240, 120)])
def test_negative_control_fixed_size_batches_are_rejected(
    wrong: Callable[[int, int], np.ndarray], n: int, expected: int
) -> None:
    assert size_p(wrong(n, expected), binomial(n, expected)) < REJECTED


def test_negative_control_shuffling_is_rejected_by_its_steps() -> None:
    assert step_overlap_p(shuffled(240, 120), binomial(240, 120)) < REJECTED


def test_negative_control_drawing_neighbours_together_is_rejected() -> None:
    drawn, law = in_pairs(240, 72), binomial(240, 72)
    assert stats.binomtest(int(drawn.sum()), drawn.size, 0.3).pvalue > REJECTED
    assert neighbour_overlap_p(drawn, law) < REJECTED


@pytest.mark.parametrize("index", [0, 1, -2, -1])
def test_the_ends_are_drawn_as_often_as_the_rest(index: int) -> None:
    counts = poisson(240, 72)[:, index].sum()
    assert stats.binomtest(int(counts), STEPS, 0.3).pvalue > REJECTED


def test_failure_5_batches_are_empty_as_often_as_they_should_be() -> None:
    empty = int((poisson(240, 1).sum(axis=1) == 0).sum())
    assert stats.binomtest(empty, STEPS, (1 - 1 / 240) ** 240).pvalue > REJECTED
    assert stats.binomtest(0, STEPS, (1 - 1 / 240) ** 240).pvalue < REJECTED


def test_a_hundred_million_examples() -> None:
    """Sizes and places, where no array of n fits the test: sizes are Binomial, places uniform."""
    n, expected = 100_000_000, 1000
    sampler = PoissonBatchSampler.of(n, expected, Entropy(0))
    batches = [sampler.draw(step) for step in range(300)]
    total = sum(map(len, batches))
    assert stats.binomtest(total, n * len(batches), expected / n).pvalue > REJECTED
    assert stats.kstest(np.concatenate(batches) / n, "uniform").pvalue > REJECTED
    sizes = np.array([len(batch) for batch in batches])
    assert chi_square_p(float(((sizes - expected) ** 2).sum() / (expected * (1 - expected / n))), len(sizes)) > REJECTED
    assert math.isclose(sampler.sampling_probability, 1e-5)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("n", "q"), [(240, 0.05), (24, 0.4)])
def test_a_probability_of_its_own_is_what_is_drawn_with(check: Callable[..., float], n: int, q: float) -> None:
    drawn = drawn_by(PoissonBatchSampler.of(n, 60, Entropy(0), sampling_probability=q))
    assert check(drawn, Law(stats.binom.pmf(np.arange(n + 1), n, q))) > REJECTED
    if check is total_p:  # negative control: what would follow from another n
        assert check(drawn, Law(stats.binom.pmf(np.arange(n + 1), n, 60 / 240))) < REJECTED
