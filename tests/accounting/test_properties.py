"""What must hold of every event, ledger and budget."""

import json
import math

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dp.accounting import (
    Ledger,
    calibrate_noise_multiplier,
    epsilon,
    event_from_dict,
    event_to_dict,
    step_event,
)

noises = st.floats(0.3, 30)
probabilities = st.floats(1e-3, 1)
steps = st.integers(1, 3000)
deltas = st.sampled_from([1e-8, 1e-5, 1e-3])
accountants = st.sampled_from(["pld", "rdp"])
slow = settings(max_examples=8, deadline=None, derandomize=True)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def cost(noise, q, count, delta, accountant):
    return epsilon(dp.SelfComposedDpEvent(step_event(noise, q), count), delta, accountant)


@slow
@given(noises, probabilities, steps, deltas, accountants)
@pytest.mark.slow
def test_epsilon_grows_with_steps_and_sampling_and_falls_with_noise_and_delta(noise, q, count, delta, accountant):
    here = cost(noise, q, count, delta, accountant)
    # The grid follows noise and sampling, and its rounding moves with it; steps and delta share one grid.
    slack = 1 + 1e-3
    assert cost(noise, q, count + 1, delta, accountant) >= here * (1 - 1e-9)
    assert cost(noise, q, count, delta * 2, accountant) <= here * (1 + 1e-9)
    assert cost(noise * 1.1, q, count, delta, accountant) <= here * slack
    assert cost(noise, min(1.0, q * 1.1), count, delta, accountant) >= here / slack


@slow
@given(noises, probabilities, steps, deltas)
def test_privacy_loss_distributions_are_never_looser_than_renyi(noise, q, count, delta):
    assert cost(noise, q, count, delta, "pld") <= cost(noise, q, count, delta, "rdp")


@slow
@given(noises, probabilities, steps, deltas)
def test_sampling_only_helps(noise, q, count, delta):
    assert cost(noise, q, count, delta, "pld") <= cost(noise, 1.0, count, delta, "pld") * (1 + 1e-3)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.floats(0.01, 50), st.floats(1e-2, 1), steps, deltas, accountants)
@pytest.mark.slow
def test_calibration_is_tight_and_never_over(target, q, count, delta, accountant):
    noise = calibrate_noise_multiplier(
        target_epsilon=target, target_delta=delta, sampling_probability=q, steps=count, accountant=accountant
    )
    assert cost(noise, q, count, delta, accountant) <= target
    assert cost(noise * 0.997, q, count, delta, accountant) > target


leaves = st.one_of(
    st.builds(dp.GaussianDpEvent, st.floats(0, 1e6)),
    st.builds(step_event, st.floats(0, 1e6), st.floats(1e-9, 1)),
    st.just(dp.NonPrivateDpEvent()),
    st.just(dp.NoOpDpEvent()),
)
events = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(dp.SelfComposedDpEvent, inner, st.integers(0, 10**7)),
        st.builds(dp.ComposedDpEvent, st.lists(inner, max_size=4)),
    ),
    max_leaves=8,
)


@quick
@given(events)
def test_every_event_survives_strict_json(event):
    assert event_from_dict(json.loads(json.dumps(event_to_dict(event), allow_nan=False))) == event


@quick
@given(st.lists(st.tuples(events, st.sampled_from(["training step", "release"]), st.integers(1, 9)), max_size=8))
def test_every_ledger_survives_json_and_counts_its_steps(charges):
    ledger = Ledger(promise={"n": len(charges)})
    for event, label, count in charges:
        ledger.charge(event, label, count)
    again = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict(), allow_nan=False)))
    assert again == ledger
    assert again.event == ledger.event
    assert ledger.steps == sum(count for _, label, count in charges if label == "training step")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "event", "events", "count", "version", "promise"]), inner),
    ),
    max_leaves=6,
)


@quick
@given(json_values)
@pytest.mark.slow
def test_whatever_is_no_event_is_refused_by_our_own_error(value):
    from hf_dp.errors import LedgerError

    try:
        event = event_from_dict(value)
    except LedgerError:
        return
    assert isinstance(event, dp.DpEvent)
    assert event_from_dict(event_to_dict(event)) == event


@quick
@given(st.floats(0.5, 5), st.integers(1, 40))
def test_charging_one_by_one_is_charging_at_once(noise, count):
    one, all_at_once = Ledger(), Ledger()
    for _ in range(count):
        one.charge(step_event(noise, 1.0))
    all_at_once.charge(step_event(noise, 1.0), count=count)
    assert one == all_at_once
    assert math.isfinite(one.epsilon(1e-5, "rdp"))
