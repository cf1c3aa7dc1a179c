"""`hf-dp plan` as it is typed."""

import json
import subprocess
import sys

import dp_accounting as dp
import pytest

from hf_dp import accounting
from hf_dp.accounting import ExampleUnit, default_delta, epsilon, sampling_terms, step_event, truncated
from hf_dp.accounting.accountants import group_epsilon
from hf_dp.cli import plot
from hf_dp.errors import ConfigurationError
from hf_dp.planning.proposal import candidate
from hf_dp.planning.start import start
from tests.cli.typed import BASE, invoke


@pytest.mark.slow
def test_json_plan_keeps_the_budget_under_both_accountants():
    result = invoke(*BASE, "--epochs", "10", "--epsilon", "8", "--json")
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    assert plan["steps"] == 200
    assert plan["sampling_probability"] == 512 / 10003
    assert plan["delta"] == default_delta(10003)
    for accountant in ("pld", "rdp"):
        event = dp.SelfComposedDpEvent(step_event(plan[accountant]["noise_multiplier"], 512 / 10003), 200)
        assert epsilon(event, plan["delta"], accountant) == plan[accountant]["epsilon"]
        assert 7.99 < plan[accountant]["epsilon"] <= 8
    assert plan["pld"]["noise_multiplier"] < plan["rdp"]["noise_multiplier"]


def test_groups_of_parameters_are_told_their_norms_and_cost_nothing():
    plain = ["plan", "--n", "1000", "--batch-size", "50", "--steps", "10", "--noise", "1"]
    given = [*plain, "--clipping-norm", "2", "--group", "*att[mn]*=3", "--group", "*=1"]
    flat, groups = (json.loads(invoke(*args, "--json").stdout) for args in ([*plain, "--clipping-norm", "2"], given))
    assert groups == {**flat, "clipping_groups": {"*att[mn]*": pytest.approx(3**0.5), "*": 1.0}}
    table = invoke(*given).stdout
    assert "clipping norm of *att[mn]*" in table
    assert "1.732" in table
    for wrong in ("*attn*", "*attn*=", "a b=1", "*attn*=0"):
        refused = invoke(*plain, "--group", wrong)
        assert refused.exit_code == 2
        assert f"--group {wrong}" in refused.output


@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
@pytest.mark.slow
def test_a_cap_on_batches_is_answered_by_the_one_accountant_that_has_it():
    def planned(*flags):
        return json.loads(invoke(*BASE, "--steps", "50", "--epsilon", "8", "--json", *flags).stdout)

    plain, capped = planned(), planned("--max-batch-size", "560")
    assert (plain["max_batch_size"], capped["max_batch_size"], "rdp" in capped) == (None, 560, False)
    assert plain["pld"]["noise_multiplier"] < capped["pld"]["noise_multiplier"]
    event = sampling_terms(10003, 512, {"max_batch_size": 560}).event(
        dp.GaussianDpEvent(capped["pld"]["noise_multiplier"]), ExampleUnit(number=10003)
    )
    found = epsilon(dp.SelfComposedDpEvent(event, 50), capped["delta"])
    assert found == capped["pld"]["epsilon"] <= 8
    table = invoke(*BASE, "--steps", "50", "--noise", "1", "--max-batch-size", "560").stdout
    assert "560" in table
    assert "RDP is not offered" in " ".join(table.split())
    below = invoke(*BASE, "--steps", "50", "--noise", "1", "--max-batch-size", "100")
    assert (below.exit_code, "below the expected batch size of 512" in below.stderr) == (2, True)


def test_a_plan_for_units_is_that_of_as_many_examples():
    rest = ("--batch-size", "32", "--steps", "4", "--noise", "1")
    one, two = (json.loads(invoke("plan", option, "150", *rest, "--json").stdout) for option in ("--n", "--units"))
    assert (one.pop("counts"), two.pop("counts")) == ("examples", "units")
    assert one == two
    said = " ".join(invoke("plan", "--units", "150", *rest).stdout.split())
    assert "units processed" in said
    assert "all of the training data but one unit" in said
    both = invoke("plan", "--units", "150", "--n", "600", *rest)
    assert (both.exit_code, "--n and --units together" in both.stderr) == (2, True)


def test_a_plan_for_examples_of_units_is_what_a_person_with_so_many_is_told():
    apart = ("--units", "150", "--unit-sampling", "examples", "--drawn-from", "320", "--max-examples", "3")
    rest = ("--batch-size", "32", "--epochs", "1", "--noise", "2")
    plan = json.loads(invoke("plan", *apart, *rest, "--json").stdout)
    assert (plan["steps"], plan["sampling_probability"], plan["delta"]) == (10, 0.1, default_delta(150))
    assert (plan["drawn_from"], plan["counts"], "rdp" in plan) == (320, "examples", False)
    run = dp.SelfComposedDpEvent(step_event(2.0, 0.1), 10)
    assert plan["pld"]["epsilon"] == pytest.approx(group_epsilon(run, default_delta(150), 3), rel=1e-9)
    said = " ".join(invoke("plan", *apart, *rest).stdout.split())
    assert "320 of 150, at most 3 of one" in said
    own = ("--sampling-probability", "0.1", "--batch-size", "32", "--steps", "10", "--noise", "2", "--delta", "1e-4")
    secret = json.loads(invoke("plan", *own, *apart[2:4], *apart[6:], "--json").stdout)
    assert (secret["max_examples_per_unit"], secret["counts"], "drawn_from" in secret) == (3, "examples", False)
    assert secret["pld"]["epsilon"] == pytest.approx(group_epsilon(run, 1e-4, 3), rel=1e-9)
    whole = " ".join(invoke("plan", *own, *apart[2:4], *apart[6:]).stdout.split())
    assert "a secret number, at most 3 of one" in whole
    assert "all of the training data but one unit" in whole
    both = invoke("plan", *own, *apart[2:])
    assert (both.exit_code, "with --drawn-from and --sampling-probability" in both.stderr) == (2, True)
    for less, found in ((apart[:4], "without --drawn-from"), ((*apart[:2], *apart[4:6]), "'units' with --drawn-from")):
        refused = invoke("plan", *less, *rest)
        assert (refused.exit_code, found in refused.stderr) == (2, True)


@pytest.mark.parametrize(("epochs", "steps"), [("1", 20), ("1.5", 30), ("0.01", 1)])
def test_epochs_are_counted_in_whole_batches_as_trainer_does(epochs, steps):
    plan = json.loads(invoke(*BASE, "--epochs", epochs, "--noise", "1", "--json").stdout)
    assert plan["steps"] == steps


def test_the_table_names_every_number():
    result = invoke(*BASE, "--steps", "200", "--noise", "0.8", "--delta", "1e-5")
    assert result.exit_code == 0
    for said in ("PLD", "RDP", "0.8000", "1e-05", "200", "0.05118", "epsilon", "noise multiplier"):
        assert said in result.stdout


def test_no_noise_is_printed_as_infinite_epsilon():
    result = invoke(*BASE, "--steps", "10", "--noise", "0", "--json")
    assert json.loads(result.stdout)["pld"]["epsilon"] == "inf"
    assert "Infinity" not in result.stdout


def test_a_batch_is_proposed_for_compute_and_privacy():
    """The knee: as many steps as there can be for hardly more noise than the largest batch would give."""
    given = {"dataset_size": 10003, "examples": 60018, "target_epsilon": 1.0, "target_delta": default_delta(10003)}
    plan = json.loads(invoke("plan", "--n", "10003", "--epochs", "6", "--epsilon", "1", "--json").stdout)
    assert plan["proposed"] is True
    assert plan["steps"] == int(60018 / plan["expected_batch_size"]) >= 10
    assert plan["examples_processed"] <= 60018
    assert 0.99 < plan["pld"]["epsilon"] <= 1
    for accountant in ("pld", "rdp"):
        noise = plan[accountant]["noise_multiplier"]
        assert plan[accountant]["noise_per_coordinate"] == noise / plan["expected_batch_size"]
    chosen, best, smaller = (
        candidate(size, **given).noise_of_the_run()
        for size in (plan["expected_batch_size"], 6001, int(plan["expected_batch_size"] * 0.9))
    )
    assert chosen <= 1.1 * best < smaller


@pytest.mark.slow
def test_fewer_steps_are_not_proposed():
    plan = json.loads(
        invoke("plan", "--n", "900", "--examples", "900", "--epsilon", "8", "--min-steps", "30", "--json").stdout
    )
    assert plan["steps"] >= 30


@pytest.mark.slow
def test_compute_is_minutes_at_a_speed_and_a_proposal_says_what_to_start_from():
    said = ("plan", "--n", "150", "--epsilon", "8", "--min-steps", "4")
    plan = json.loads(invoke(*said, "--minutes", "2", "--rows-per-second", "0.5", "--json").stdout)
    assert plan == json.loads(invoke(*said, "--examples", "60", "--json").stdout)
    batch, steps, noise = (plan["expected_batch_size"], plan["steps"], plan["pld"]["noise_multiplier"])
    assert plan["start"] == start(batch, steps, noise / batch)
    table = " ".join(invoke(*said, "--examples", "60").stdout.split())
    assert all(rule["start"].split(",")[0] in table for rule in plan["start"])
    assert "start" not in json.loads(invoke(*BASE, "--steps", "9", "--noise", "1", "--json").stdout)


def test_examples_are_steps_times_batch():
    plan = json.loads(invoke(*BASE, "--examples", "5120", "--noise", "1", "--json").stdout)
    assert plan["steps"] == 10
    assert plan["proposed"] is False


@pytest.mark.slow
@pytest.mark.parametrize("asked", [pytest.param(["--epsilon", "3"], marks=pytest.mark.slow), ["--noise", "1"]])
def test_the_plan_is_drawn(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(plot, "_POINTS", 3)  # each takes a second
    path = tmp_path / "plan.png"
    result = invoke("plan", "--n", "400", "--batch-size", "40", "--steps", "30", *asked, "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"Figure: {path}" in result.stdout


@pytest.mark.slow
def test_plan_answers_without_torch():
    code = (
        "import sys; from hf_dp.cli import app, plot\n"
        f"app({[*BASE, '--epochs', '2', '--noise', '1']!r}, standalone_mode=False)\n"
        "assert 'dp_accounting' in sys.modules\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


OWN = ["plan", "--sampling-probability", "0.05", "--batch-size", "50"]


def test_a_whole_number_may_be_written_as_a_large_one():
    plans = [
        invoke("plan", "--n", n, "--batch-size", "50", "--steps", "1e1", "--noise", "1", "--json").stdout
        for n in ("1000", "1_000", "1e3")
    ]
    assert json.loads(plans[0])["steps"] == 10
    assert len({*plans}) == 1


def test_where_n_is_secret_a_plan_has_numbers_of_its_own():
    flags = ["--steps", "10", "--delta", "1e-5", "--epsilon", "8", "--json"]
    of_1000 = ["plan", "--n", "1000", "--batch-size", "50"]
    own, of_n = (json.loads(invoke(*base, *flags).stdout) for base in (OWN, of_1000))
    assert (own["dataset_size"], of_n["dataset_size"]) == (None, 1000)
    # q is the same, and so is what it costs.
    assert {**own, "dataset_size": 1000} == of_n
    for given, named in (
        (["--steps", "10", "--noise", "1"], "--sampling-probability without --delta"),
        (["--epochs", "2", "--delta", "1e-5", "--noise", "1"], "--sampling-probability with --epochs"),
        (["--steps", "9", "--delta", "1e-5", "--noise", "1", "--n", "9"], "--n and --sampling-probability together"),
        (["--steps", "9", "--delta", "0.5", "--noise", "1"], "--delta 0.5 with --sampling-probability"),
        (["--steps", "9", "--delta", "1e-5", "--noise", "1", "--batch-size", "0"], "--batch-size 0"),
        (["--steps", "9", "--delta", "1e-5", "--noise", "1", "--sampling-probability", "2"], "sampling_probability=2"),
    ):
        refused = invoke(*OWN, *given)
        assert (refused.exit_code, named in refused.stderr) == (2, True), refused.stderr
    without = invoke("plan", "--sampling-probability", "0.05", "--examples", "9", "--epsilon", "1", "--delta", "1e-5")
    assert "--sampling-probability without --batch-size" in without.stderr


@pytest.mark.slow
def test_a_release_besides_the_steps_is_paid_for_before_them():
    arguments = (*BASE, "--steps", "40", "--epsilon", "8", "--json")
    plain, shared = (json.loads(invoke(*arguments, *given).stdout) for given in ((), ("--share", "0.2")))
    assert shared["shares"] == [0.2]
    for accountant in ("pld", "rdp"):
        assert 1 < shared[accountant]["noise_multiplier"] / plain[accountant]["noise_multiplier"] < 1.05
        assert 7.99 < shared[accountant]["epsilon"] <= 8


@pytest.mark.parametrize(
    "wrong", [("--noise", "1"), ("--epsilon", "8", "--share", "0.9"), ("--epsilon", "8", "--plot", "x.png")]
)
def test_a_share_that_is_none_is_refused(wrong):
    said = invoke(*BASE, "--steps", "40", "--share", "0.2", *wrong)
    assert said.exit_code == 2
    assert "What to do" in said.stderr


def test_no_batch_is_proposed_for_what_is_shared():
    said = invoke("plan", "--n", "10003", "--epochs", "6", "--epsilon", "8", "--share", "0.2")
    assert said.exit_code == 2
    assert "--share without --batch-size" in said.stderr


@pytest.mark.slow
def test_options_may_be_spelt_as_in_python():
    usual = ["--n", "500", "--batch-size", "50", "--steps", "5", "--delta", "1e-5"]
    python = ["--n", "500", "--batch_size", "50", "--max_steps", "5", "--target-delta=1e-5"]
    for budget, spelt in (
        (["--epsilon", "8"], ["--target_epsilon", "8"]),
        (["--epsilon", "8"], ["--eps", "8"]),
        (["--tpr", "0.2", "--fpr", "0.05"], ["--target-tpr", "0.2", "--at_fpr", "0.05"]),
    ):
        one, other = (invoke("plan", *each, "--json") for each in ([*usual, *budget], [*python, *spelt]))
        assert (one.exit_code, other.stdout) == (0, one.stdout)
    assert "No such option: --no-such" in invoke("plan", "--no_such", "3").stderr


@pytest.mark.slow
def test_a_plan_says_where_delta_leaves_little():
    for n, is_said in (("3", True), ("10003", False)):
        planned = invoke("plan", "--n", n, "--batch-size", "2", "--steps", "2", "--noise", "1")
        assert ("Note: delta is 0.299" in planned.stdout) == is_said


def test_a_noise_that_renyi_accounting_cannot_show_is_told_by_the_other(monkeypatch):
    whole = accounting.calibrated

    def by_pld(*args, accountant, **kwargs):
        if accountant == "rdp":
            raise ConfigurationError("target_epsilon=1e-09.", why="no noise is shown to reach it.", fix="raise it.")
        return whole(*args, accountant=accountant, **kwargs)

    monkeypatch.setattr(accounting, "calibrated", by_pld)
    result = invoke(*BASE, "--steps", "3", "--noise", "1")
    assert result.exit_code == 0, result.output
    assert "RDP, which is looser, shows no noise for this" in " ".join(result.stdout.split())
    assert set(json.loads(invoke(*BASE, "--steps", "3", "--noise", "1", "--json").stdout)) >= {"pld", "risk"}
