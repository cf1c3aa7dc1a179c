"""Epsilon of many steps against an exact integral, also where rounding hides the loss from Fourier transforms."""

import math

import dp_accounting as dp
import numpy as np
import pytest
from scipy import optimize

from hf_dp.accounting import epsilon, step_event
from hf_dp.accounting.composition import StepLoss, composed_epsilon

CASES = [
    (1e-4, 0.7, 10_000, 1e-12),
    (1e-7, 0.3, 1_000_000, 1e-10),
    (1e-3, 1.0, 1000, 1e-14),
    (0.01, 0.8, 2000, 1e-5),
    (0.3, 2.0, 50, 1e-8),
]


def exact_epsilon(q, noise, steps, delta, *, furthest=200.0, apart=0.03):
    """Where an example is removed: the inversion of the moment generating function M of one step's loss.

    delta(epsilon) is the integral of M(z)^steps exp(-z epsilon) / (z (1 + z)) over z = order + it, divided by 2 pi i;
    the order is the saddle point of the integrand, so that nothing cancels.
    """
    fine = min(noise / 8, noise**2 / furthest)

    def tilted(order):
        x = np.arange(-12 * noise, 2 + order + 12 * noise, fine)
        loss = np.logaddexp(math.log1p(-q), math.log(q) + (x - 0.5) / noise**2)
        logs = (1 + order) * loss - x**2 / (2 * noise**2)
        weights = np.exp(logs - logs.max())
        cumulant = logs.max() + math.log(weights.sum() * fine / noise / math.sqrt(2 * math.pi))
        return loss, weights / weights.sum(), cumulant

    def chernoff(log_order):
        order = math.exp(log_order)
        share = order * math.log(order) - (1 + order) * math.log1p(order)
        return (steps * tilted(order)[2] - math.log(delta) + share) / order

    order = math.exp(min(np.linspace(0, 4.5, 40), key=chernoff))
    loss, weights, cumulant = tilted(order)
    loss, weights = loss[weights > 1e-13], weights[weights > 1e-13]
    t = np.arange(apart / 2, furthest, apart)
    transform = np.array([weights @ np.exp(1j * each * loss) for each in t]) ** steps
    z = order + 1j * t

    def excess(eps):
        found = (transform * np.exp(-1j * t * eps) / (z * (1 + z))).real.sum() * apart / math.pi
        return steps * cumulant - order * eps + math.log(max(found, 1e-9)) - math.log(delta)

    return optimize.brentq(excess, 1e-3, chernoff(math.log(order)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("q", "noise", "steps", "delta"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (2 <= i <= 3)) for i, case in enumerate(CASES)],
)
def test_failure_32_epsilon_is_never_below_an_exact_integral(q, noise, steps, delta):
    exact = exact_epsilon(q, noise, steps, delta, furthest=200.0 if noise > 0.5 else 120.0)
    found = epsilon(dp.SelfComposedDpEvent(step_event(noise, q), steps), delta)
    assert exact * (1 - 1e-5) <= found <= exact * (1 + 5e-3)


def test_negative_control_convolutions_that_are_not_tilted_fall_below_it():
    q, noise, steps, delta = CASES[0]
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-3)
    found = accountant.compose(step_event(noise, q), steps).get_epsilon(delta)
    assert found < 0.995 * exact_epsilon(q, noise, steps, delta)


@pytest.mark.slow
def test_steps_of_several_kinds_and_releases_are_summed_as_one():
    steps = [dp.SelfComposedDpEvent(step_event(1.0, 0.02), 300), dp.SelfComposedDpEvent(step_event(1.5, 0.1), 40)]
    event = dp.ComposedDpEvent([*steps, dp.GaussianDpEvent(9.0)])
    theirs = dp.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-6)
    assert epsilon(event, 1e-6) == pytest.approx(theirs, rel=5e-4)


def test_a_loss_that_is_infinite_as_often_as_delta_has_no_epsilon():
    step = StepLoss(-1, np.array([0.5, 0.0, 0.5 - 1e-7]), 1e-7)
    assert composed_epsilon([(step, 20)], 0.1, 1.9e-6) == math.inf
    assert composed_epsilon([(step, 10)], 0.1, 2e-6) < 10 * 0.1
    assert composed_epsilon([(step, 10)], 0.1, 2e-6, at_least=3.0) == 3.0
