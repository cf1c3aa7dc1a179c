"""Epsilon, calibration and the budget stop against known values and a closed form."""

import json
import logging
import math
import subprocess
import sys

import dp_accounting as dp
import pytest
from scipy import optimize, stats

from hf_dp.accounting import (
    calibrate_noise_multiplier,
    check_delta,
    default_delta,
    epsilon,
    event_from_dict,
    event_to_dict,
    step_event,
)
from hf_dp.errors import ConfigurationError, LedgerError


def run(noise, q, steps):
    return dp.SelfComposedDpEvent(step_event(noise, q), steps)


def gaussian_epsilon(noise, delta):
    """The analytic Gaussian mechanism (Balle and Wang 2018, arXiv:1805.06530, theorem 8), solved for epsilon."""

    def excess(eps):
        upper = stats.norm.logcdf(0.5 / noise - eps * noise)
        lower = eps + stats.norm.logcdf(-0.5 / noise - eps * noise)
        return upper + math.log1p(-math.exp(lower - upper)) - math.log(delta)

    return optimize.brentq(excess, 0, 0.5 / noise**2 + 40 / noise, xtol=1e-12)


def test_known_values_of_both_accountants():
    event = run(0.8, 0.01, 2000)
    assert epsilon(event, 1e-5) == pytest.approx(4.2934, abs=1e-3)
    assert epsilon(event, 1e-5, "rdp") == pytest.approx(4.8611, abs=1e-3)


@pytest.mark.parametrize(
    ("noise", "steps"), [(1.0, 1), (5.0, 30), (0.05, 2), (0.02, 1), (300.0, 1000), (2000.0, 10_000_000)]
)
def test_without_sampling_epsilon_is_that_of_the_analytic_gaussian_mechanism(noise, steps):
    truth = gaussian_epsilon(noise / math.sqrt(steps), 1e-6)
    found = epsilon(run(noise, 1.0, steps), 1e-6)
    assert truth <= found <= truth * (1 + 1e-3)
    # The comparison is sharp enough to notice noise that is wrong by a third.
    for wrong in (2 / 3, 3 / 2):
        other = gaussian_epsilon(wrong * noise / math.sqrt(steps), 1e-6)
        assert not other <= found <= other * (1 + 1e-3)


def test_epsilon_equals_dp_accounting_on_its_own_fine_grid():
    event = run(1.1, 0.02, 300)
    theirs = dp.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-5)
    assert epsilon(event, 1e-5) == pytest.approx(theirs, rel=2e-4)


def test_step_event_is_the_event_one_would_write_by_hand():
    assert step_event(1.5, 0.25) == dp.PoissonSampledDpEvent(0.25, dp.GaussianDpEvent(1.5))
    assert step_event(0, 0.25) == dp.NonPrivateDpEvent()


def test_nesting_does_not_change_epsilon():
    step, release = step_event(0.9, 0.01), dp.GaussianDpEvent(20.0)
    flat = dp.ComposedDpEvent([release] + [step] * 6)
    inner = dp.ComposedDpEvent([step, dp.SelfComposedDpEvent(step, 2), dp.NoOpDpEvent()])
    nested = dp.ComposedDpEvent([dp.SelfComposedDpEvent(inner, 2), release])
    assert epsilon(flat, 1e-5) == epsilon(nested, 1e-5) > epsilon(dp.SelfComposedDpEvent(step, 6), 1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "leak", [dp.NonPrivateDpEvent(), dp.GaussianDpEvent(0.0), dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0))]
)
def test_anything_without_noise_makes_epsilon_infinite(leak, accountant):
    assert epsilon(dp.ComposedDpEvent([step_event(1.0, 0.1), leak]), 1e-5, accountant) == math.inf
    assert epsilon(dp.ComposedDpEvent([]), 1e-5, accountant) == 0


@pytest.mark.parametrize(
    "event",
    [
        dp.LaplaceDpEvent(1.0),
        dp.UnsupportedDpEvent(),
        dp.PoissonSampledDpEvent(1.5, dp.GaussianDpEvent(1.0)),
        dp.PoissonSampledDpEvent(0.5, dp.PoissonSampledDpEvent(0.5, dp.GaussianDpEvent(1.0))),
        dp.GaussianDpEvent(-1.0),
        dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), -1),
    ],
)
def test_an_event_that_is_not_known_is_refused(event):
    for use in (lambda: epsilon(event, 1e-5), lambda: event_to_dict(event)):
        with pytest.raises(LedgerError, match="not known here"):
            use()


def test_events_survive_strict_json():
    event = dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(step_event(0.7, 0.3), 4),
            dp.GaussianDpEvent(2.0),
            dp.NonPrivateDpEvent(),
            dp.NoOpDpEvent(),
        ]
    )
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event), allow_nan=False))) == event
    for broken in ({}, None, {"type": "gaussian"}, {"type": "laplace", "noise_multiplier": 1}, {"type": ["a"]}):
        with pytest.raises(LedgerError):
            event_from_dict(broken)


@pytest.mark.parametrize("target", [0.01, pytest.param(0.5, marks=pytest.mark.slow), 8, 1000])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_failure_20_calibration_is_tight_and_never_over(target, accountant):
    q, steps, delta = 0.05, 200, 4e-5
    noise = calibrate_noise_multiplier(
        target_epsilon=target, target_delta=delta, sampling_probability=q, steps=steps, accountant=accountant
    )
    assert epsilon(run(noise, q, steps), delta, accountant) <= target
    assert epsilon(run(noise * 0.998, q, steps), delta, accountant) > target


@pytest.mark.parametrize(
    ("noise", "q", "steps"),
    [
        (0.05, 0.01, 1000),
        (1e-9, 0.01, 1000),
        (1e-170, 0.5, 10),
        (1e150, 0.01, 10),
        (1e6, 0.01, 10_000_000),
        (1.0, 0.001, 10_000_000),
        (0.5, 0.1, 10_000_000),
        (1.0, 1e-9, 10_000_000),
        (0.3, 1e-6, 10_000_000),
        (1e-9, 1.0, 10_000_000),
        (1.0, 0.9999999, 1000),
    ],
)
@pytest.mark.slow
def test_failure_20_extreme_noise_and_ten_million_steps_neither_overflow_nor_hang(noise, q, steps):
    tight, loose = (epsilon(run(noise, q, steps), 1e-6, accountant) for accountant in ("pld", "rdp"))
    assert 0 <= tight <= loose
    # With tiny noise epsilon must be huge, with huge noise tiny: nothing has silently become 0 or infinite.
    assert tight > 1e3 if noise < 0.1 else math.isfinite(tight)
    assert tight < 1e-3 if noise > 1e5 else tight > 1e-6


@pytest.mark.parametrize("target", [0, -1.0, math.nan, math.inf, True, "8"])
def test_failure_20_a_target_that_is_no_budget_is_refused(target):
    with pytest.raises(ConfigurationError, match=r"target_epsilon=[\s\S]*What to do"):
        calibrate_noise_multiplier(target_epsilon=target, target_delta=1e-5, sampling_probability=0.1, steps=10)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target_delta": 0}, "delta=0"),
        ({"sampling_probability": 1.1}, "sampling_probability=1.1"),
        ({"sampling_probability": 0}, "sampling_probability=0"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"accountant": "gdp"}, "accountant='gdp'"),
    ],
)
def test_calibration_names_what_it_refuses(change, named):
    good = {"target_epsilon": 8, "target_delta": 1e-5, "sampling_probability": 0.1, "steps": 10}
    with pytest.raises(ConfigurationError, match=named):
        calibrate_noise_multiplier(**{**good, **change})


@pytest.mark.parametrize("n", [2, 1000, 10**8])
def test_default_delta_is_below_one_over_n(n):
    assert check_delta(default_delta(n), n) == default_delta(n) == pytest.approx(n**-1.1)
    assert default_delta(n) < 1 / n


@pytest.mark.parametrize(("delta", "n"), [(0.001, 1000), (0.5, 1000), (0, 1000), (-1e-9, 1000), (math.nan, 1000)])
def test_a_delta_that_promises_nothing_is_refused(delta, n):
    with pytest.raises(ConfigurationError, match=r"1/n is 0.001[\s\S]*What to do"):
        check_delta(delta, n)


def test_a_single_one_is_promised_a_delta_that_is_given():
    assert check_delta(1e-5, 1) == 1e-5
    for refused in (lambda: check_delta(0.5, 1), lambda: check_delta(0, 1), lambda: default_delta(1)):
        with pytest.raises(ConfigurationError, match=r"n=1 [\s\S]*1e-5") as caught:
            refused()
        assert "1/n" not in str(caught.value)  # the limit is 1/2


@pytest.mark.parametrize("n", [0, -5, 2.5, True])
def test_a_number_of_none_is_refused(n):
    for use in (lambda: default_delta(n), lambda: check_delta(0.1, n)):
        with pytest.raises(ConfigurationError, match=f"n={n}"):
            use()


def test_warnings_of_the_renyi_orders_are_silenced_here_only(caplog):
    logger = logging.getLogger("absl")
    before = logger.level
    event = run(0.5123, 0.1, 1000)
    with caplog.at_level(logging.WARNING):
        epsilon(event, 1e-5, "rdp")
        assert not caplog.records
        dp.rdp.RdpAccountant().compose(event)
    assert caplog.records, "this event was chosen because dp_accounting does warn about it"
    assert logger.level == before


@pytest.mark.slow
def test_whether_a_program_logs_is_left_to_it():
    code = (
        "import logging; from hf_dp.accounting import epsilon; from tests.accounting.test_accountants import run; "
        "epsilon(run(0.5123, 0.1, 1000), 1e-5, 'rdp'); assert not logging.root.handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_accounting_imports_no_torch_and_silences_nothing():
    code = (
        "import logging, sys; import hf_dp.accounting; "
        "assert not {'torch', 'transformers'} & set(sys.modules); "
        "import dp_accounting; assert logging.getLogger('absl').level < logging.ERROR"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
