"""Rows that survive by chance, and the DP top-k: in number, in place, and against wrong noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, gumbel_scale, noisy_top_k
from hf_dp.randomness import Entropy

# Seeds are fixed; see test_noise_statistics.py.
REJECTED = 1e-3
ROWS, STEPS, DEVIATION, THRESHOLD = 2_000, 400, 1.5, 4.0
TOUCHED = torch.tensor([0, 3, 4, 5, 900, 1998, 1999])
COUNTS = torch.tensor([0.5, 1.0, 4.0, 3.0, 6.0, 2.0, 9.0], dtype=torch.float64)
RATE = float(special.ndtr(-THRESHOLD / DEVIATION))


def by_skipping(deviation: float) -> list[Tensor]:
    selection = AdaptiveSelection(ROWS, deviation, THRESHOLD, GaussianNoise(Entropy(1)))
    return [selection.survivors(TOUCHED, COUNTS.clone(), step).rows for step in range(STEPS)]


def by_one_normal_for_each_row(deviation: float) -> list[Tensor]:
    noise, found = GaussianNoise(Entropy(2)), []
    for step in range(STEPS):
        counts = torch.zeros(ROWS, dtype=torch.float64)
        counts[TOUCHED] = COUNTS
        noise.add_([counts], deviation, step)
        found.append((counts >= THRESHOLD).nonzero().squeeze(1))
    return found


WAYS = pytest.mark.parametrize("way", [by_skipping, by_one_normal_for_each_row])
Way = Callable[[float], list[Tensor]]


def false_positives(steps: list[Tensor]) -> list[list[int]]:
    taken = set(TOUCHED.tolist())
    return [[row for row in rows.tolist() if row not in taken] for rows in steps]


def number_p(steps: list[Tensor]) -> float:
    """The counts of all steps together are binomial."""
    total = sum(map(len, false_positives(steps)))
    return float(stats.binomtest(total, STEPS * (ROWS - len(TOUCHED)), RATE).pvalue)


def spread_p(steps: list[Tensor]) -> float:
    """Their variance from step to step is that of a binomial: chi-squared."""
    counts, n = np.array([len(rows) for rows in false_positives(steps)]), ROWS - len(TOUCHED)
    statistic = float(((counts - n * RATE) ** 2).sum() / (n * RATE * (1 - RATE)))
    return float(2 * min(stats.chi2.cdf(statistic, STEPS), stats.chi2.sf(statistic, STEPS)))


def place_p(steps: list[Tensor]) -> float:
    """They lie anywhere alike, but for rows that are touched."""
    free = np.setdiff1d(np.arange(ROWS), TOUCHED.numpy())
    places = np.searchsorted(free, np.concatenate([np.array(rows, dtype=int) for rows in false_positives(steps)]))
    observed = np.histogram(places, bins=20, range=(0, len(free)))[0]
    return float(stats.chisquare(observed).pvalue)


def touched_p(steps: list[Tensor]) -> float:
    """Each touched row survives as often as its count and the noise say: the smallest p-value, times their number."""
    found = [
        stats.binomtest(
            sum(row in rows.tolist() for rows in steps), STEPS, float(special.ndtr((count - THRESHOLD) / DEVIATION))
        ).pvalue
        for row, count in zip(TOUCHED.tolist(), COUNTS.tolist(), strict=True)
    ]
    return float(min(found)) * len(found)


CHECKS = [number_p, spread_p, place_p, touched_p]


@pytest.mark.few(3)
@WAYS
@pytest.mark.parametrize("check", CHECKS)
def test_survivors_have_the_distribution_of_one_normal_for_each_row(way: Way, check: Callable[..., float]):
    assert check(way(DEVIATION)) > REJECTED


@WAYS
@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
@pytest.mark.parametrize("check", [number_p, touched_p])
@pytest.mark.slow
def test_negative_control_wrong_noise_is_rejected(way: Way, factor: float, check: Callable[..., float]):
    assert check(way(DEVIATION * factor)) < REJECTED


def test_negative_control_a_fixed_number_and_a_crowd_are_rejected():
    n = round((ROWS - len(TOUCHED)) * RATE)
    draw = np.random.default_rng(0)
    fixed = [torch.from_numpy(draw.choice(np.arange(6, 890), n, replace=False)) for _ in range(STEPS)]
    assert spread_p(fixed) < REJECTED
    assert place_p(fixed) < REJECTED


@pytest.mark.slow
def test_the_number_of_false_positives_does_not_follow_the_touched_rows():
    """Noise on counts and gaps between false positives come from independent streams."""
    steps = by_skipping(DEVIATION)
    taken = set(TOUCHED.tolist())
    true = [sum(row in taken for row in rows.tolist()) for rows in steps]
    assert stats.pearsonr(true, [len(rows) for rows in false_positives(steps)]).pvalue > REJECTED


def first_place_p(scale: float, claimed: float) -> float:
    """The winner of a Gumbel top-1 is drawn by the exponential mechanism: P proportional to exp(count / scale)."""
    counts = torch.tensor([0.0, 1.0, 2.0, 3.0])
    winners = [int(noisy_top_k(counts, 1, scale, GaussianNoise(Entropy(0)), i)[0]) for i in range(2_000)]
    weights = torch.softmax(counts / claimed, 0).double().numpy()
    return float(stats.chisquare(np.bincount(winners, minlength=4), 2_000 * weights / weights.sum()).pvalue)


@pytest.mark.slow
def test_the_top_k_is_an_exponential_mechanism():
    assert first_place_p(1.5, 1.5) > REJECTED
    assert first_place_p(1.0, 1.5) < REJECTED
    assert first_place_p(2.25, 1.5) < REJECTED


def test_the_second_place_is_an_exponential_mechanism_among_the_rest():
    counts, scale = torch.tensor([3.0, 0.0, 2.0]), 1.2
    both = [tuple(noisy_top_k(counts, 2, scale, GaussianNoise(Entropy(3)), i).tolist()) for i in range(2_000)]
    w = torch.exp(counts / scale).double().numpy()
    pair = {
        (i, j): w[i] / w.sum() * w[j] / (w.sum() - w[i]) + w[j] / w.sum() * w[i] / (w.sum() - w[j])
        for i, j in ((0, 1), (0, 2), (1, 2))
    }
    observed = [both.count(key) for key in pair]
    assert stats.chisquare(observed, [2_000 * p for p in pair.values()]).pvalue > REJECTED


@pytest.mark.parametrize(("noise", "k"), [(1.0, 1), (5.0, 100), (0.3, 2), (20.0, 10_000)])
def test_the_gaussian_that_is_charged_dominates_each_exponential_mechanism(noise: float, k: int):
    """No mechanism with two outcomes whose losses differ by lambda lies below the trade-off curve of the share."""
    width, mu = 1 / gumbel_scale(noise, k), 1 / (noise * k**0.5)
    x = np.linspace(-30, 30, 200_001)
    gap = -special.ndtri_exp(special.log_expit(-x - width)) - special.ndtri_exp(special.log_expit(x))
    assert gap.max() <= mu * (1 + 1e-9)
    # The bound is reached, so less noise would not be enough.
    assert gap.max() >= mu * (1 - 1e-6)
