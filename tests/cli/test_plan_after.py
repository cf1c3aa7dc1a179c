"""`hf-dp plan` after an earlier training on the same people."""

import json

import dp_accounting as dp
import pytest

from hf_dp import PrivacyConfig
from hf_dp.accounting import ExampleUnit, Release, default_delta, epsilon, step_event
from hf_dp.accounting.earlier import Earlier
from hf_dp.accounting.units import ColumnUnit, UncountedColumnUnit, UncountedExampleUnit
from tests.cli.typed import invoke
from tests.training.workbench import trained

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.slow
def test_a_plan_after_an_earlier_training_has_what_that_left(tmp_path):
    said = PrivacyConfig(noise_multiplier=1.0, accountant="rdp", other_people=True)
    trained(tmp_path / "first", privacy=said).save_model()
    spent = epsilon(dp.SelfComposedDpEvent(step_event(1.0, 8 / 48), 4), default_delta(48))
    steps = ("plan", "--n", "40", "--batch-size", "8", "--steps", "4")
    silent = (*steps, "--after", str(tmp_path / "first"))
    # As the training itself would be.
    refused = invoke(*silent, "--noise", "2")
    assert (refused.exit_code, "which does not say it too" in refused.stderr) == (2, True)
    alone = invoke(*steps, "--noise", "2", "--other-people")
    assert (alone.exit_code, "--other-people without --after" in alone.stderr) == (2, True)
    options = (*silent, "--after", str(tmp_path / "first"), "--other-people")  # one record, one training
    of_units = invoke(*("--units" if word == "--n" else word for word in options), "--noise", "2")
    assert (of_units.exit_code, "with the unit" in of_units.stderr) == (2, True)
    plan = json.loads(invoke(*options, "--noise", "2", "--json").stdout)
    assert (plan["after"], plan["delta"], "rdp" in plan) == (["first"], default_delta(48), False)
    assert plan["pld"]["spent_before"] == spent < plan["pld"]["epsilon"]
    table = " ".join(invoke(*options, "--noise", "2").stdout.split())
    assert "of that spent before" in table
    assert "spent on the same people before (first), by PLD" in table
    none_left = invoke(*options, "--epsilon", str(spent))
    assert (none_left.exit_code, "was spent before, at delta" in none_left.stderr) == (2, True)
    proposed = invoke("plan", "--n", "40", "--epochs", "4", "--epsilon", "8", "--after", str(tmp_path / "first"))
    assert (proposed.exit_code, "--after without --batch-size." in proposed.stderr) == (2, True)


@pytest.mark.parametrize(
    ("before", "goes"),
    [
        (ColumnUnit(number=40, column="user", max_examples=2), "--units"),
        (ExampleUnit(number=40), "--n"),
        (UncountedColumnUnit(column="user", max_examples=2), "--sampling-probability"),
        (UncountedExampleUnit(), "--sampling-probability"),
    ],
)
def test_a_plan_after_an_earlier_training_hides_what_that_hid(before, goes, monkeypatch):
    release = Release("earlier 1, training step", dp.GaussianDpEvent(9.0), 1)
    first = Earlier(
        name="first", record_sha256="0" * 64, unit=before, epsilon=1.0, delta=1e-3, reproducible=False,
        releases=(release,),
    )  # fmt: skip
    monkeypatch.setattr("hf_dp.cli.costs._trainings", lambda *of: (first,))
    for ask, value in {"--n": "40", "--units": "40", "--sampling-probability": "0.2"}.items():
        steps = ("--batch-size", "8", "--steps", "4", "--noise", "2", "--delta", "1e-3", "--after", "first")
        said = invoke("plan", ask, value, *steps)
        assert (said.exit_code, "with the unit" in said.stderr) == ((0, False) if ask == goes else (2, True))
