"""No claim is below what nobody can claim less than, by another computation; and that one would notice."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from hf_dp.accounting import epsilon, has_renyi
from tests.accounting import lower_bounds
from tests.accounting.cases import Case, all_cases, capped, composed, poisson, several
from tests.accounting.exact import gaussian_delta

FEW = (
    poisson(1.0, 2.0, 4, 1e-12),
    poisson(0.05, 0.8, 100, 1e-5),
    poisson(0.01, 1.0, 300, 1e-12),
    several(0.3, 2.0, 20, 2, 1e-9),
    next(composed(1e-5)),
)


def ids(case: Case) -> str:
    return f"{case.kind}: {case.name}, delta {case.delta:g}"


def weaker(case: Case) -> Case:
    """The same with two thirds of the noise."""
    mixtures = tuple((lower_bounds.Mixture(m.noise * 2 / 3, m.parts), n) for m, n in case.mixtures)
    return Case(case.kind, case.name, case.event, mixtures, case.delta)


@pytest.mark.parametrize("case", FEW, ids=ids)
def test_no_claim_is_below_and_two_thirds_of_the_noise_would_be_noticed(case: Case) -> None:
    claimed = epsilon(case.event, case.delta)
    assert 0.9 * case.delta < case.lower_delta(claimed) <= case.delta
    assert weaker(case).lower_delta(claimed) > 10 * case.delta


@pytest.mark.slow
@pytest.mark.parametrize("case", tuple(all_cases()), ids=ids)
def test_no_claim_of_the_whole_grid_is_below(case: Case) -> None:
    claimed = epsilon(case.event, case.delta)
    assert math.isfinite(claimed)
    assert case.lower_delta(claimed) <= case.delta
    if has_renyi(case.event):
        assert case.lower_delta(epsilon(case.event, case.delta, "rdp")) <= case.delta
    if case.kind != "truncated" and claimed > 1e-6:
        assert case.lower_epsilon(claimed) > 0.95 * claimed
        assert weaker(case).lower_delta(claimed) > case.delta


def test_of_gaussians_the_bound_is_close_below_the_closed_form() -> None:
    true = functools.partial(gaussian_delta, math.sqrt(4) / 2.0)
    found = poisson(1.0, 2.0, 4, 1e-6)
    for eps in (0.5, 2.0, 4.0):
        assert 0.95 * true(eps) < found.lower_delta(eps) <= true(eps)
    exact = optimize.brentq(lambda e: true(e) - 1e-6, 0, 20)
    assert 0.995 * exact < found.lower_epsilon(2 * exact) <= exact


@pytest.mark.parametrize("rows", [1, 3])
def test_of_one_step_the_bound_is_close_below_the_integral(rows: int) -> None:
    q, noise, eps = 0.2, 0.9, 0.7
    x, width = np.linspace(-9, 12, 40_001, retstep=True)
    mixed = sum(p * stats.norm.pdf(x, j, noise) for j, p in enumerate(stats.binom.pmf(range(rows + 1), rows, q)))
    without = stats.norm.pdf(x, 0, noise)
    true = max(np.maximum(a - math.exp(eps) * b, 0).sum() * width for a, b in ((mixed, without), (without, mixed)))
    assert 0.98 * true < several(q, noise, 1, rows, 1e-5).lower_delta(eps) <= true * (1 + 1e-7)


def test_another_library_agrees() -> None:
    accountants = pytest.importorskip("prv_accountant")
    q, noise, steps, delta = 0.02, 1.0, 500, 1e-6
    prv = accountants.PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=noise)
    other = accountants.PRVAccountant(prv, max_self_compositions=steps, eps_error=0.01, delta_error=1e-9)
    low, estimate, high = other.compute_epsilon(delta, [steps])
    claimed = epsilon(poisson(q, noise, steps, delta).event, delta)
    assert low <= claimed <= high
    assert claimed == pytest.approx(estimate, rel=2e-3)


@pytest.mark.slow
def test_of_a_hard_cap_the_claim_is_above_too() -> None:
    for most in (271, 240):
        case = capped(20_000, 0.01, most, 0.6, 1000, 1e-5)
        assert case.lower_delta(epsilon(case.event, case.delta)) <= case.delta
