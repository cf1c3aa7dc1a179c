"""Zero-out and add-or-remove: where they cost the same, and what would be untrue of add-or-remove."""

from __future__ import annotations

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting import pld, rdp
from scipy import stats

from hf_dp.accounting import (
    ExampleUnit,
    PoissonSampling,
    PrivacyReport,
    UncountedExampleUnit,
    default_delta,
    epsilon,
    step_event,
)
from hf_dp.accounting.neighbours import ADD_OR_REMOVE, SAID_BEFORE, ZERO_OUT
from hf_dp.accounting.renyi import RDP_ORDERS
from hf_dp.parts.sparse_embeddings.top_k import gumbel_scale
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from tests.accounting.exact import gaussian_delta

ADDED, ZEROED, REPLACED = (
    dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    dp.NeighboringRelation.REPLACE_SPECIAL,
    dp.NeighboringRelation.REPLACE_ONE,
)
STEPS = dp.SelfComposedDpEvent(step_event(0.8, 0.05), 100)
# Every kind of event that a ledger here can hold.
EVENTS = {
    "steps": STEPS,
    "steps without sampling": dp.SelfComposedDpEvent(step_event(20.0, 1.0), 100),
    "a release of token frequencies": dp.ComposedDpEvent([step_event(9.0, 1.0), STEPS]),
    "DP-FEST's choices, as the Gaussians that dominate them": dp.ComposedDpEvent(
        [dp.SelfComposedDpEvent(dp.GaussianDpEvent(12.0), 3), STEPS]
    ),
    "stages with different batches": dp.ComposedDpEvent(
        [STEPS, dp.SelfComposedDpEvent(step_event(1.1, 0.02), 50), dp.NoOpDpEvent()]
    ),
    "no noise": dp.ComposedDpEvent([STEPS, dp.NonPrivateDpEvent()]),
}


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.slow
def test_zero_out_costs_what_add_or_remove_costs(name: str) -> None:
    event, delta = EVENTS[name], 1e-5
    found = {
        relation: (
            rdp.RdpAccountant(RDP_ORDERS, relation).compose(event).get_epsilon(delta),
            pld.PLDAccountant(relation, 1e-3).compose(event).get_epsilon(delta),
        )
        for relation in (ADDED, ZEROED)
    }
    assert found[ZEROED] == found[ADDED]
    assert epsilon(event, delta, "rdp") == pytest.approx(found[ZEROED][0], rel=1e-12)
    assert epsilon(event, delta) == pytest.approx(found[ZEROED][1], rel=1e-2)


@pytest.mark.parametrize(("noise", "q"), [(0.8, 0.05), (20.0, 1.0)])
def test_the_losses_that_are_composed_are_those_of_zero_out(noise: float, q: float) -> None:
    added, zeroed, replaced = (
        pld.privacy_loss_distribution.from_gaussian_mechanism(
            noise, value_discretization_interval=1e-3, sampling_prob=q, neighboring_relation=relation
        )
        for relation in (ADDED, ZEROED, REPLACED)
    )
    for side in ("_pmf_remove", "_pmf_add"):
        one, two = (getattr(losses, side).to_dense_pmf() for losses in (added, zeroed))
        assert one._lower_loss == two._lower_loss
        assert np.array_equal(one._probs, two._probs)
    # Negative control: another relation has other losses.
    assert replaced.get_epsilon_for_delta(1e-5) > 1.02 * zeroed.get_epsilon_for_delta(1e-5)


def test_counts_and_gradients_of_one_sample_cost_one_gaussian() -> None:
    """DP-AdaFEST: one unit adds nothing to both; the accountant of dp_accounting knows their composition."""
    counts, gradient = 3.0, 0.9
    both = dp.PoissonSampledDpEvent(
        0.05, dp.ComposedDpEvent([dp.GaussianDpEvent(counts), dp.GaussianDpEvent(gradient)])
    )
    joint = step_event((counts**-2 + gradient**-2) ** -0.5, 0.05)
    for relation in (ADDED, ZEROED):
        costs = [
            rdp.RdpAccountant(RDP_ORDERS, relation).compose(dp.SelfComposedDpEvent(event, 100)).get_epsilon(1e-5)
            for event in (both, joint)
        ]
        assert costs[0] == pytest.approx(costs[1], rel=1e-12)


def choices(counts: np.ndarray, k: int, scale: float) -> np.ndarray:
    """The probability of each ordered choice of k rows: exponential mechanisms in a row."""
    weights = np.exp(counts / scale)
    found = []
    for rows in itertools.permutations(range(len(counts)), k):
        left = weights.sum() - np.concatenate([[0.0], np.cumsum(weights[list(rows)])[:-1]])
        found.append(np.prod(weights[list(rows)] / left))
    return np.array(found)


@pytest.mark.parametrize(("noise", "k"), [(1.0, 1), (1.0, 2), (2.0, 3), (0.5, 2)])
def test_the_gaussian_that_is_charged_dominates_the_top_k_under_zero_out(noise: float, k: int) -> None:
    scale = gumbel_scale(noise, k)
    counts = np.array([2.0, 0.0, 1.0, 3.0, 1.0])

    def excess(one: np.ndarray, two: np.ndarray) -> float:
        p, q = choices(one, k, scale), choices(two, k, scale)
        worst = -math.inf
        for eps in (0.0, 0.25, 0.5, 1.0, 2.0, 3.0):
            worst = max(worst, float(np.maximum(p - math.exp(eps) * q, 0).sum()) - gaussian_delta(1 / noise, eps))
        return worst

    touched = [np.array(rows, dtype=float) for rows in itertools.product((0, 1), repeat=5)]
    assert max(max(excess(counts + a, counts), excess(counts, counts + a)) for a in touched) <= 1e-12
    # Negative control: replaced by another one, it lowers some counts and raises others, and costs more.
    assert max(excess(counts + a, counts + 1 - a) for a in touched) > 1e-3


def excess_delta(one: np.ndarray, two: np.ndarray, epsilon: float) -> float:
    """The larger of the two smallest deltas with which densities on a grid (cells,) are epsilon-close."""
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in ((one, two), (two, one)))


@pytest.mark.parametrize(
    ("epsilon", "charged", "true"), [(0.5, 0.0524, 0.231), (2.0, 9.44e-6, 0.0441), (4.0, 2.71e-16, 0.00345)]
)
def test_failure_31_with_q_from_n_add_or_remove_would_be_untrue(epsilon: float, charged: float, true: float) -> None:
    """An expected batch of all n: one example more, and each is left out of a step with probability 1 / (n + 1)."""
    n, noise = 100, 2.0
    x, width = np.linspace(n - 60, n + 40, 20_001, retstep=True)

    def sum_of(number: int, q: float, others: float = 0.0) -> np.ndarray:
        """The density of one step's noisy sum of examples whose clipped gradient is 1, and of one with another."""
        drawn = np.arange(number + 1)
        means = [(k + others * last, p) for k, p in zip(drawn, stats.binom.pmf(drawn, number, q), strict=True)
                 for last, p in ((0, p * (1 - q)), (1, p * q)) if p > 1e-20]  # fmt: skip
        return sum(p * stats.norm.pdf(x, mean, noise) for mean, p in means) * width

    stated = gaussian_delta(1 / noise, epsilon)  # of the Gaussian mechanism that is charged
    zeroed = excess_delta(sum_of(n, 1.0), sum_of(n - 1, 1.0), epsilon)
    added = excess_delta(sum_of(n, 1.0), sum_of(n, n / (n + 1), others=-1.0), epsilon)
    assert zeroed == pytest.approx(stated, rel=1e-3)
    assert (stated, added) == (pytest.approx(charged, rel=0.01), pytest.approx(true, rel=0.01))
    # With q a number of its own, adding one is the same as putting it in the place of nothing.
    same_q = excess_delta(sum_of(n, 1.0), sum_of(n, 1.0, others=-1.0), epsilon)
    assert same_q == pytest.approx(stated, rel=1e-3)


def test_with_another_n_another_mechanism_runs() -> None:
    one, other = (PoissonBatchSampler.of(n, 50, Entropy(0)) for n in (100, 101))
    assert (one.sampling_probability, len(one), default_delta(100)) == (0.5, 2, 100**-1.1)
    assert (other.sampling_probability, len(other), default_delta(101)) == (50 / 101, 3, 101**-1.1)


def test_with_a_probability_of_its_own_the_same_mechanism_runs_whatever_n_is() -> None:
    samplers = [PoissonBatchSampler.of(n, 50, Entropy(0), sampling_probability=0.4) for n in (30, 100, 101)]
    assert {(s.terms, s.unit, len(s), s.public_size) for s in samplers} == {
        (PoissonSampling(probability=0.4, expected_batch_size=50), UncountedExampleUnit(), 3, 125.0)
    }
    # One example more is drawn, or not, and moves nobody else.
    for step in range(50):
        few, some, more = (sampler.draw(step) for sampler in samplers)
        assert (few, some) == ([i for i in more if i < 30], [i for i in more if i < 100])


@pytest.mark.parametrize("others", [0, 40])
def test_with_a_probability_of_its_own_one_example_more_or_less_costs_what_is_charged(others: int) -> None:
    """Sums of `others` examples whose clipped gradient is 1, and of one more, whose is -1: their densities."""
    noise, q, eps = 1.5, 0.3, 1.0
    x, width = np.linspace(-20, others + 20, 40_001, retstep=True)

    def density(probability_of_one_more: float, size: float = 1.0) -> np.ndarray:
        drawn = stats.binom.pmf(np.arange(others + 1), others, q)
        one_more = ((0, 1 - probability_of_one_more), (size, probability_of_one_more))
        means = [(k - added, p * share) for k, p in enumerate(drawn) for added, share in one_more if p * share > 1e-20]
        return sum(p * stats.norm.pdf(x, mean, noise) for mean, p in means) * width

    charged = pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, value_discretization_interval=1e-4, sampling_prob=q, neighboring_relation=ADDED
    ).get_delta_for_epsilon(eps)
    found = excess_delta(density(0.0), density(q), eps)
    # Alone it is the mechanism that is charged; other examples hide it.
    assert found < charged if others else found == pytest.approx(charged, rel=1e-3)
    # Negative controls: a gradient over the bound, and a probability that is not the one that is charged.
    if not others:
        assert excess_delta(density(0.0), density(q, size=1.2), eps) > 1.2 * charged
        assert excess_delta(density(0.0), density(1.2 * q), eps) > 1.2 * charged


def test_every_record_says_which_relation_it_is() -> None:
    assert PrivacyReport.adjacency == ExampleUnit.adjacency == ZERO_OUT
    assert ZERO_OUT == "replace one by nothing (zero-out), n public"
    assert UncountedExampleUnit.adjacency == ADD_OR_REMOVE == "add or remove one, n secret"
    # What the first records said, of zero-out.
    assert SAID_BEFORE == "add or remove one"
