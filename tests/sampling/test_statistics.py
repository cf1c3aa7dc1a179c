"""Does the sampler draw what the accountant is told? Every check must also reject samplers that are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler

# Seeds are fixed, so a right sampler passes always; a p-value below this says that the draws are wrong.
REJECTED = 1e-3
STEPS = 2000


def poisson(n: int, expected: int, seed: int = 0) -> np.ndarray:
    """Which step (row) drew which example (column): (steps, n) of bool."""
    sampler = PoissonBatchSampler.of(n, expected, Entropy(seed))
    drawn = np.zeros((STEPS, n), dtype=bool)
    for step in range(STEPS):
        drawn[step, sampler.draw(step)] = True
    return drawn


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


def chi_square_p(statistic: float, degrees: int) -> float:
    return float(2 * min(stats.chi2.cdf(statistic, degrees), stats.chi2.sf(statistic, degrees)))


def total_p(drawn: np.ndarray, q: float) -> float:
    return float(stats.binomtest(int(drawn.sum()), drawn.size, q).pvalue)


def inclusion_p(drawn: np.ndarray, q: float) -> float:
    """Each example's count over the steps is Binomial(steps, q)."""
    counts, steps = drawn.sum(axis=0), len(drawn)
    return chi_square_p(float(((counts - steps * q) ** 2).sum() / (steps * q * (1 - q))), len(counts))


def size_p(drawn: np.ndarray, q: float) -> float:
    """The batch sizes are Binomial(n, q): chi-square over ten equally likely bins."""
    steps, n = drawn.shape
    edges = np.unique(stats.binom.ppf(np.linspace(0, 1, 11)[1:-1], n, q))
    expected = np.diff(np.concatenate([[0], stats.binom.cdf(edges, n, q), [1]])) * steps
    observed = np.bincount(np.searchsorted(edges, drawn.sum(axis=1)), minlength=len(expected))
    return float(stats.chisquare(observed, expected).pvalue)


def step_overlap_p(drawn: np.ndarray, q: float) -> float:
    """Examples common to steps 2k and 2k + 1: independent pairs, each with probability q ** 2."""
    both = drawn[0::2] & drawn[1::2]
    return float(stats.binomtest(int(both.sum()), both.size, q**2).pvalue)


def neighbour_overlap_p(drawn: np.ndarray, q: float) -> float:
    """Examples 2k and 2k + 1 in the same step."""
    both = drawn[:, 0::2] & drawn[:, 1::2]
    return float(stats.binomtest(int(both.sum()), both.size, q**2).pvalue)


CHECKS = [total_p, inclusion_p, size_p, step_overlap_p, neighbour_overlap_p]
SHAPES = [(240, 12), (240, 72), (240, 120), (24, 12), (240, 192)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("n", "expected"), SHAPES)
def test_the_sampler_is_poisson(check, n, expected):
    q = PoissonBatchSampler.of(n, expected, Entropy(0)).sampling_probability
    assert check(poisson(n, expected), q) > REJECTED


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("n", "expected"), [(240, 12), (240, 72), (240, 120)])
@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
def test_negative_control_a_wrong_probability_is_rejected(check, n, expected, factor):
    assert check(poisson(n, round(expected * factor)), expected / n) < REJECTED


@pytest.mark.parametrize("wrong", [fixed_size, shuffled])
@pytest.mark.parametrize(("n", "expected"), [(240, 12), (240, 80), (240, 120)])
def test_negative_control_fixed_size_batches_are_rejected(wrong, n, expected):
    assert size_p(wrong(n, expected), expected / n) < REJECTED


def test_negative_control_shuffling_is_rejected_by_its_steps():
    assert step_overlap_p(shuffled(240, 120), 0.5) < REJECTED


def test_negative_control_drawing_neighbours_together_is_rejected():
    drawn = in_pairs(240, 72)
    assert total_p(drawn, 0.3) > REJECTED
    assert neighbour_overlap_p(drawn, 0.3) < REJECTED


@pytest.mark.parametrize("index", [0, 1, -2, -1])
def test_the_ends_are_drawn_as_often_as_the_rest(index):
    counts = poisson(240, 72)[:, index].sum()
    assert stats.binomtest(int(counts), STEPS, 0.3).pvalue > REJECTED


def test_failure_5_batches_are_empty_as_often_as_they_should_be():
    empty = int((poisson(240, 1).sum(axis=1) == 0).sum())
    assert stats.binomtest(empty, STEPS, (1 - 1 / 240) ** 240).pvalue > REJECTED
    assert stats.binomtest(0, STEPS, (1 - 1 / 240) ** 240).pvalue < REJECTED


def test_a_hundred_million_examples():
    """Sizes and places, where no array of n fits the test: sizes are Binomial, places uniform."""
    n, expected = 100_000_000, 1000
    sampler = PoissonBatchSampler.of(n, expected, Entropy(0))
    batches = [sampler.draw(step) for step in range(300)]
    total = sum(map(len, batches))
    assert stats.binomtest(total, n * len(batches), expected / n).pvalue > REJECTED
    assert stats.kstest(np.concatenate(batches) / n, "uniform").pvalue > REJECTED
    sizes = np.array([len(batch) for batch in batches])
    assert chi_square_p(float(((sizes - expected) ** 2).sum() / (expected * (1 - expected / n))), len(sizes)) > REJECTED
