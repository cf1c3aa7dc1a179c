"""The ledger: what it counts, what it survives, and every file that it refuses."""

import json
import math
import sys

import dp_accounting as dp
import pytest

from hf_dp.accounting import Ledger, epsilon, step_event
from hf_dp.accounting import ledger as ledger_module
from hf_dp.errors import LedgerError

STEP = step_event(1.0, 0.1)
PROMISE = {"dataset_size": 100, "noise_multiplier": 1.0, "clipping_norm": math.inf, "config": {"target_epsilon": None}}


@pytest.fixture
def charged():
    ledger = Ledger(promise=PROMISE)
    ledger.charge(dp.GaussianDpEvent(10.0), label="token frequencies")
    for _ in range(5):
        ledger.charge(STEP)
    return ledger


def test_steps_are_run_length_encoded_and_other_releases_are_not_steps(charged):
    assert charged.steps == 5
    assert charged.entries == ((dp.GaussianDpEvent(10.0), 1, "token frequencies"), (STEP, 5, "training step"))
    charged.charge(STEP, count=3)
    charged.charge(STEP, label="probe")
    assert charged.steps == 8
    assert len(charged.entries) == 3


def test_its_event_is_the_composition_of_all_charges(charged):
    by_hand = dp.ComposedDpEvent([dp.SelfComposedDpEvent(dp.GaussianDpEvent(10.0), 1), dp.SelfComposedDpEvent(STEP, 5)])
    assert charged.event == by_hand
    assert charged.epsilon(1e-5) == epsilon(by_hand, 1e-5) > epsilon(dp.SelfComposedDpEvent(STEP, 5), 1e-5)
    assert Ledger().event == dp.NoOpDpEvent()
    assert Ledger().epsilon(1e-5) == 0


def test_epsilon_is_computed_once_between_charges(charged, monkeypatch):
    calls = []
    monkeypatch.setattr(ledger_module, "epsilon", lambda *args: calls.append(args) or float(len(calls)))
    assert [charged.epsilon(1e-5) for _ in range(3)] == [1.0] * 3
    assert charged.epsilon(1e-5, "rdp") == 2.0
    charged.charge(STEP)
    assert charged.epsilon(1e-5) == 3.0


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_charge_that_is_no_charge_is_refused(charged, count):
    with pytest.raises(LedgerError, match="only grows"):
        charged.charge(STEP, count=count)
    with pytest.raises(LedgerError, match="not known here"):
        charged.charge(dp.LaplaceDpEvent(1.0))
    assert charged.steps == 5


def test_round_trip_through_strict_json(charged):
    again = Ledger.from_dict(json.loads(json.dumps(charged.to_dict(), allow_nan=False)))
    assert again == charged
    assert again.epsilon(1e-5) == charged.epsilon(1e-5)
    assert again.promise["clipping_norm"] == "inf"
    again.check_same_promise(PROMISE)


def damaged(change):
    ledger = Ledger(promise=PROMISE)
    ledger.charge(STEP, count=3)
    values = ledger.to_dict()
    change(values)
    return values


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(version=99),
        lambda v: v.pop("version"),
        lambda v: v.update(extra=1),
        lambda v: v.update(promise=None),
        lambda v: v.update(entries={}),
        lambda v: v["entries"].append(3),
        lambda v: v["entries"][0].update(count=-3),
        lambda v: v["entries"][0].update(count=0),
        lambda v: v["entries"][0].update(count="3"),
        lambda v: v["entries"][0].update(label=None),
        lambda v: v["entries"][0].pop("event"),
        lambda v: v["entries"][0]["event"].update(type="laplace"),
        lambda v: v["entries"][0]["event"].update(sampling_probability=2.0),
        lambda v: v["entries"][0]["event"].update(surprise=2.0),
        lambda v: v["entries"][0]["event"]["event"].update(noise_multiplier="1.0"),
        lambda v: v["entries"][0].update(event={"type": "self_composed", "count": -1, "event": {"type": "no_op"}}),
    ],
)
def test_a_ledger_that_was_tampered_with_is_refused(change):
    with pytest.raises(LedgerError, match=r"What to do"):
        Ledger.from_dict(json.loads(json.dumps(damaged(change))))


@pytest.mark.parametrize("values", [[], None, "", {}, {"version": 1}])
def test_what_is_something_else_is_refused(values):
    with pytest.raises(LedgerError, match="not a readable privacy ledger"):
        Ledger.from_dict(values)


def test_releases_are_told_by_their_labels_and_steps_are_none(charged):
    charged.charge(dp.GaussianDpEvent(3.0), label="rows", count=2)
    charged.charge(STEP)
    charged.charge(dp.GaussianDpEvent(3.0), label="rows")
    charged.charge(dp.GaussianDpEvent(4.0), label="rows")
    found = [(release.label, release.noise_multiplier, release.times) for release in charged.releases]
    assert found == [("token frequencies", 10.0, 1), ("rows", 3.0, 3), ("rows", 4.0, 1)]


def test_another_promise_is_refused_and_each_difference_is_named(charged):
    other = {**PROMISE, "dataset_size": 101, "config": {"target_epsilon": 8.0}, "delta": 1e-5}
    with pytest.raises(LedgerError) as refusal:
        charged.check_same_promise(other)
    assert "dataset_size: 100 in the ledger, 101 now" in refusal.value.found
    assert "delta: 'absent' in the ledger, 1e-05 now" in refusal.value.found
    assert "{'target_epsilon': None} in the ledger, {'target_epsilon': 8.0} now" in refusal.value.found
    assert "noise_multiplier" not in refusal.value.found


def test_the_same_earlier_trainings_in_another_order_are_told_so():
    for other, told in ((["b", "a"], True), (["a", "c"], False)):
        with pytest.raises(LedgerError) as refusal:
            Ledger(promise={**PROMISE, "earlier": ["a", "b"]}).check_same_promise({**PROMISE, "earlier": other})
        assert ("in the order of the first run" in refusal.value.fix) == told


def test_a_promise_that_json_cannot_hold_is_refused():
    with pytest.raises(LedgerError, match="cannot be written as JSON"):
        Ledger(promise={"model": object()})
    with pytest.raises(LedgerError, match="cannot be written as JSON"):
        Ledger(promise={"delta": math.nan})


def interrupted(act, number, by=None):
    """Whether `act` came to its instruction `number` (from 1) of this file, and was interrupted there, by a
    KeyboardInterrupt, or by what returns."""
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename != ledger_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == number:
                if by is None:
                    raise KeyboardInterrupt
                by()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return seen >= number


@pytest.mark.parametrize("label", ["training step", "probe"])
def test_whenever_a_charge_is_interrupted_nothing_before_it_is_lost_or_remembered_as_all(charged, label):
    charges, number, is_interrupted = charged.charges, 0, True
    assert charged.epsilon(1e-5) < charged.epsilon(1e-6)
    while is_interrupted:
        number += 1
        ledger = Ledger.from_dict(charged.to_dict())
        ledger.epsilon(1e-5)
        is_interrupted = interrupted(lambda: ledger.charge(STEP, label), number)  # noqa: B023
        assert ledger.steps >= 5, number
        assert ledger.charges in (charges, charges + 1)
        assert ledger.own_steps + len(ledger.own_labels) >= ledger.charges - charges
        assert ledger.epsilon(1e-5) == epsilon(ledger.event, 1e-5)
    assert number > 20
    assert ledger.charges == charges + 1


@pytest.mark.parametrize("label", ["training step", "probe"])
def test_whoever_looks_in_the_middle_of_a_charge_leaves_it_no_epsilon_of_before(charged, label):
    """A handler of a signal that saves, and goes on; or another thread."""
    ledger, number, is_looked_at = Ledger.from_dict(charged.to_dict()), 0, True
    while is_looked_at:
        number += 1
        ledger = Ledger.from_dict(charged.to_dict())
        is_looked_at = interrupted(lambda: ledger.charge(STEP, label), number, lambda: ledger.epsilon(1e-5))  # noqa: B023
        assert ledger.epsilon(1e-5) == epsilon(ledger.event, 1e-5), number
    assert number > 20
