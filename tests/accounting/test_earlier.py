"""What was spent on the same people before: paid first, charged once, and true for one unit in each data set."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import dp_accounting as dp
import pytest
from scipy import optimize

from hf_dp.accounting import (
    ColumnExamplesUnit,
    ColumnUnit,
    Earlier,
    ExampleUnit,
    FlatClipping,
    GaussianNoise,
    Ledger,
    Mechanism,
    PoissonSampling,
    Release,
    UncountedExampleUnit,
    calibrated,
    delta_after,
    epsilon,
    step_event,
)
from hf_dp.accounting.earlier import charge, event_of, released_by
from hf_dp.accounting.events import MOST_MECHANISMS
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError
from tests.accounting.exact import gaussian_delta

DELTA = 1e-4


def earlier(**changes: Any) -> Earlier:
    values = {
        "name": "sft", "record_sha256": "0f" * 32, "unit": ExampleUnit(number=1000), "epsilon": 2.0, "delta": 5e-4,
        "reproducible": False, "releases": (Release("earlier 1, training step", step_event(1.5, 1.0), 1),),
    }  # fmt: skip
    return Earlier(**{**values, **changes})


def mechanism(*before: Earlier, **changes: Any) -> Mechanism:
    values = {
        "unit": ExampleUnit(number=500), "sampling": PoissonSampling(probability=0.1, expected_batch_size=50.0),
        "clipping": FlatClipping(norm=1.0), "noise": GaussianNoise(multiplier=1.0), "steps": 3, "delta": DELTA,
    }  # fmt: skip
    return Mechanism(**{**values, **changes}, earlier=before)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Of normals whose means are mu deviations apart, exactly."""
    return float(optimize.brentq(lambda e: gaussian_delta(mu, e) - delta, 0, 50))


def test_it_holds_for_one_unit_in_each_data_set_and_for_no_more():
    ledger, own = Ledger(), 2.0
    charge(ledger, (earlier(),))
    ledger.charge(step_event(own, 1.0))
    claimed = ledger.epsilon(DELTA)
    # A unit in each moves the first sum by a 1.5th of its noise, and the second by half of it.
    assert claimed == pytest.approx(gaussian_epsilon(math.hypot(1 / 1.5, 1 / own), DELTA), rel=5e-3)
    assert claimed >= gaussian_epsilon(math.hypot(1 / 1.5, 1 / own), DELTA)
    # The controls: of one training alone less is claimed than holds of both; and who is twice in one data set has more.
    assert max(epsilon(step_event(sigma, 1.0), DELTA) for sigma in (1.5, own)) < 0.9 * claimed
    assert gaussian_epsilon(math.hypot(2 / 1.5, 1 / own), DELTA) > 1.5 * claimed


def test_what_was_spent_is_paid_before_the_noise_is_calibrated():
    before = earlier(releases=(Release("earlier 1, training step", step_event(0.9, 0.1), 20),))
    budget = 1.2 * epsilon(dp.SelfComposedDpEvent(step_event(0.9, 0.1), 20), DELTA, "rdp")

    def both(noise: float) -> float:
        own = dp.SelfComposedDpEvent(step_event(noise, 0.1), 30)
        return epsilon(dp.ComposedDpEvent([event_of((before,)), own]), DELTA, "rdp")

    _, noise = calibrated(
        lambda sigma: step_event(sigma, 0.1), steps=30, delta=DELTA, target_epsilon=budget, accountant="rdp",
        earlier=(before,),
    )  # fmt: skip
    assert both(noise) <= budget < both(0.98 * noise)


def test_a_budget_that_was_spent_is_refused_with_what_it_would_take():
    with pytest.raises(
        BudgetExceededError, match=r"target_epsilon=2, and on the same people 2\.\d+ was spent"
    ) as error:
        calibrated(lambda s: step_event(s, 0.1), steps=9, delta=DELTA, target_epsilon=2.0, earlier=(earlier(),))
    assert "give a target_epsilon well above 2." in str(error.value)
    unsafe = earlier(releases=(Release("earlier 1, training step", dp.NonPrivateDpEvent(), 1),))
    with pytest.raises(BudgetExceededError, match="inf was spent before"):
        calibrated(lambda s: step_event(s, 0.1), steps=9, delta=DELTA, target_epsilon=99.0, earlier=(unsafe,))


@pytest.mark.parametrize("budget", [{"target_epsilon": 2.0}, {"target_tpr": 0.05, "at_fpr": 0.01}])
@pytest.mark.slow
def test_what_a_calibration_left_over_is_no_budget(budget: dict[str, float]) -> None:
    def noise_after(*before: Earlier, **changes: float) -> float:
        step = functools.partial(step_event, sampling_probability=0.1)
        return calibrated(step, steps=9, delta=DELTA, **{**budget, **changes}, earlier=before)[1]

    spent = Release("earlier 1, training step", step_event(alone := noise_after(), 0.1), 9)
    with pytest.raises(BudgetExceededError, match="was spent before"):
        noise_after(earlier(releases=(spent,)))
    name, value = next(iter(budget.items()))
    assert noise_after(earlier(releases=(spent,)), **{name: 1.1 * value}) < 5 * alone


def test_charged_once_and_under_labels_that_no_part_of_a_later_training_knows():
    first = Ledger()
    first.charge(step_event(5.0, 1.0), "token presence")
    first.charge(step_event(1.0, 0.1), count=4)
    one = earlier(releases=released_by(first, 1))
    second = Ledger()
    for _ in range(2):
        charge(second, (one,))
    assert [(label, count) for _, count, label in second.entries] == [
        ("earlier 1, token presence", 1), ("earlier 1, training step", 4)
    ]  # fmt: skip
    assert second.steps == 0
    second.charge(step_event(2.0, 0.1))
    assert [made.label for made in released_by(second, 2)] == ["earlier 2, training step"]


def test_the_delta_is_one_for_all():
    public, secret = earlier(), earlier(unit=UncountedExampleUnit(), delta=1e-6)
    assert delta_after((public,), 1e-3, is_given=False) == 5e-4
    assert delta_after((public, secret), 1e-9, is_given=False) == 1e-9
    assert delta_after((public,), 9e-4, is_given=True) == 9e-4
    with pytest.raises(ConfigurationError, match="for a dataset of 1000 units of the training before, 'sft'"):
        delta_after((public,), 2e-3, is_given=True)
    with pytest.raises(ConfigurationError, match="the number of its units is secret"):
        delta_after((secret,), 2e-6, is_given=True)


def test_a_mechanism_with_it_is_read_as_it_was_written():
    two = earlier(name="head", epsilon=math.inf, reproducible=True)
    whole = mechanism(earlier(), two, reproducible=True)
    assert Mechanism.from_dict(json.loads(json.dumps(whole.to_dict(), allow_nan=False))) == whole
    assert "earlier" not in mechanism().to_dict()
    assert "earlier" not in mechanism().promise(_config())
    assert mechanism(earlier()).promise(_config())["earlier"] == ["0f" * 32]
    together = dp.ComposedDpEvent([whole.event])
    assert epsilon(together, DELTA) > epsilon(mechanism().event, DELTA)


@pytest.mark.parametrize(
    "changes",
    [
        {"record_sha256": "0f"}, {"epsilon": -1.0}, {"epsilon": "2"}, {"name": "**private**"}, {"delta": 0.0},
        {"reproducible": 0}, {"releases": []}, {"releases": [{}]}, {"unit": {"kind": "example"}}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_earlier_training_is_refused(changes):
    values = {**earlier().to_dict(), **changes}
    if values["releases"] == []:
        del values["releases"]
    with pytest.raises(LedgerError):
        Earlier.from_dict(values)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ((earlier(reproducible=True),), "reproducible=False"),
        ((earlier(unit=UncountedExampleUnit()),), "n public in both or secret in both"),
        (
            (earlier(unit=ColumnUnit(number=9, column="user", max_examples=2)),),
            "all training examples with one value of 'user'",
        ),
        ((earlier(),) * 17, "17 trainings before this one"),
    ],
)
def test_units_that_are_hidden_otherwise_have_no_epsilon_in_common(before, words):
    with pytest.raises(ConfigurationError, match=words):
        mechanism(*before)


@pytest.mark.parametrize("kind", [ColumnUnit, functools.partial(ColumnExamplesUnit, examples=9)])
def test_units_of_two_columns_are_two_kinds_of_people(kind):
    before, after = (kind(number=9, column=column, max_examples=2) for column in ("user", "author"))
    with pytest.raises(ConfigurationError, match="all training examples with one value of 'user'"):
        mechanism(earlier(unit=before), unit=after)


def test_users_may_have_other_caps_and_numbers():
    users = [ColumnUnit(number=number, column="user", max_examples=most) for number, most in ((9, 2), (70, 4))]
    assert mechanism(earlier(unit=users[0]), unit=users[1]).earlier


def _config() -> Any:
    from hf_dp import PrivacyConfig

    return PrivacyConfig(noise_multiplier=1.0)


def test_more_mechanisms_than_a_record_is_verified_with_are_refused_before_any_is_used():
    def before(kinds: int) -> tuple[Earlier, ...]:
        made = [Release(f"earlier {i}, x", step_event(1 + i / 10, 0.1), 10) for i in range(1, kinds + 1)]
        return tuple(earlier(releases=(release,)) for release in made)

    mechanism(*before(MOST_MECHANISMS - 1))
    with pytest.raises(ConfigurationError, match="17 different mechanisms, those of 16 trainings before"):
        mechanism(*before(MOST_MECHANISMS))
    mechanism(*[earlier()] * MOST_MECHANISMS)  # alike, they are one
