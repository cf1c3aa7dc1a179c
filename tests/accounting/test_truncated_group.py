"""Several rows of one person in batches with a hard cap: held against all draws, and against what is known without."""

from __future__ import annotations

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy import stats

from hf_dp.accounting import epsilon, step_event, truncated
from hf_dp.accounting.accountants import group_epsilon
from hf_dp.accounting.composition import composed_deltas
from hf_dp.accounting.group import Group
from hf_dp.accounting.risk import group_epsilons, groups_in_words
from hf_dp.accounting.truncated import Truncated
from hf_dp.accounting.truncated_group import TruncatedGroup
from tests.sampling.contract import Draws, densities, hockey_stick

pytestmark = pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
SIGMA, CELL = 1.5, 0.02


def draws(n: int, q: float, most: int) -> Draws:
    """The chance of each batch."""
    found: Draws = {}
    for flips in itertools.product((0, 1), repeat=n):
        drawn = [i for i in range(n) if flips[i]]
        kept = list(itertools.combinations(drawn, min(most, len(drawn))))
        for each in kept:
            found[each] = found.get(each, 0.0) + q ** len(drawn) * (1 - q) ** (n - len(drawn)) / len(kept)
    return found


def charged(n: int, q: float, most: int, rows: int, eps: float) -> float:
    """delta of one step."""
    one = Truncated(n, q, most, SIGMA).of_group(rows)
    assert isinstance(one, TruncatedGroup)
    return max(float(composed_deltas([(loss, 1)], CELL, np.array([eps]))[0]) for loss in one.losses(CELL))


@pytest.mark.parametrize(("most", "rows"), [(2, 2), (3, 2), (3, 3), (1, 3)])
def test_no_gradients_do_worse_than_is_charged_over_all_draws(most: int, rows: int) -> None:
    n, q = 5, 0.4
    batches = draws(n, q, most)
    for eps in (0.1, 0.5, 1.5):
        bound = charged(n, q, most, rows, eps)
        for others in itertools.product((-1.0, 1.0), repeat=n - rows):
            whole = densities(batches, [*[1.0] * rows, *others], SIGMA)
            without = densities(batches, [*[0.0] * rows, *others], SIGMA)
            assert max(hockey_stick(whole, without, eps), hockey_stick(without, whole, eps)) <= bound * (1 + 1e-6)


def test_negative_control_to_charge_for_fewer_rows_would_be_untrue() -> None:
    n, q, most, rows = 5, 0.4, 2, 2
    batches = draws(n, q, most)
    whole = densities(batches, [1.0, 1.0, -1.0, -1.0, -1.0], SIGMA)
    without = densities(batches, [0.0, 0.0, -1.0, -1.0, -1.0], SIGMA)
    one = Group(q, SIGMA, 1).losses(CELL)[0], TruncatedGroup(n, most, Group(q, SIGMA, 1)).losses(CELL)[0]
    fewer = [float(composed_deltas([(loss, 1)], CELL, np.array([0.5]))[0]) for loss in one]
    assert fewer[0] < hockey_stick(whole, without, 0.5) <= charged(n, q, most, rows, 0.5)
    assert fewer[1] < charged(n, q, most, rows, 0.5)


def test_where_the_cap_is_never_reached_it_is_that_of_a_poisson_sample_and_a_lower_one_costs_more() -> None:
    run = dp.SelfComposedDpEvent(step_event(1.0, 0.1), 10)
    found = []
    for most in (400, 150, 130, 110):
        capped = dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(1.0), 1000, 0.1, most), 10)
        found.append(group_epsilon(capped, 1e-5, 4))
    assert found[0] == pytest.approx(group_epsilon(run, 1e-5, 4), rel=1e-6)
    assert all(one <= other for one, other in itertools.pairwise(found))  # type: ignore[operator]
    assert found[-1] > 1.1 * found[0]  # type: ignore[operator]


def test_the_probability_that_somebody_may_be_left_out() -> None:
    one = TruncatedGroup(100, 12, Group(0.1, 1.0, 3))
    assert one.full == pytest.approx(1 - stats.binom.cdf(9, 97, 0.1), rel=1e-9)
    assert TruncatedGroup(100, 2, Group(0.1, 1.0, 3)).full == 1
    assert one.of_group(1) is one


def test_it_is_told() -> None:
    capped = dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(2.0), 1000, 0.1, 150), 10)
    found = group_epsilons(dp.ComposedDpEvent([dp.GaussianDpEvent(9.0), capped]), 1e-5, 0.0)
    assert all(math.isfinite(epsilon) for epsilon in found.values())  # type: ignore[arg-type]
    assert "at the same delta epsilon is" in groups_in_words(found)


def test_several_rows_never_read_as_less_than_one_of_which_another_bound_is_claimed() -> None:
    half = dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(4.0), 200, 0.5, 100), 50)
    of_one, of_two = epsilon(half, 1e-4), group_epsilon(half, 1e-4, 2)
    assert of_two is not None
    assert of_two < of_one  # as they are proven
    found = group_epsilons(half, 1e-4, of_one)
    costs = [of_one, *found.values()]
    assert None not in costs
    assert costs == sorted(costs)  # type: ignore[type-var]
    assert found[16] == group_epsilon(half, 1e-4, 16)
