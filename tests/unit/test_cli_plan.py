"""`hf-dp plan` as it is typed."""

import json
import re
import subprocess
import sys

import dp_accounting as dp
import pytest
from typer.testing import CliRunner

from hf_dp.accounting import default_delta, epsilon, step_event
from hf_dp.cli import app

BASE = ["plan", "--n", "10003", "--batch-size", "512"]


def invoke(*args):
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


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


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([*BASE, "--epochs", "10"], "neither of --epsilon and --noise"),
        ([*BASE, "--epochs", "10", "--epsilon", "8", "--noise", "1"], "both --epsilon and --noise"),
        ([*BASE, "--epsilon", "8"], "neither of --epochs and --steps"),
        ([*BASE, "--epochs", "10", "--epsilon", "0"], "target_epsilon=0"),
        ([*BASE, "--epochs", "10", "--epsilon", "-1"], "target_epsilon=-1"),
        ([*BASE, "--epochs", "10", "--noise", "-1"], "noise_multiplier=-1"),
        ([*BASE, "--epochs", "0", "--noise", "1"], "--epochs 0"),
        ([*BASE, "--epochs", "inf", "--noise", "1"], "--epochs inf"),
        ([*BASE, "--steps", "0", "--noise", "1"], "steps=0"),
        ([*BASE, "--steps", "1", "--noise", "1", "--delta", "0.1"], "delta=0.1"),
        (["plan", "--n", "100", "--batch-size", "512", "--steps", "1", "--noise", "1"], "--batch-size 512"),
        (["plan", "--n", "1", "--batch-size", "1", "--steps", "1", "--noise", "1"], "n=1"),
    ],
)
def test_bad_input_is_refused_in_words_with_code_2(args, named):
    result = invoke(*args)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "What to do:" in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_a_missing_option_exits_with_code_2():
    assert invoke("plan", "--n", "100").exit_code == 2


def test_help_teaches_with_an_example_that_runs():
    text = invoke("plan", "--help").stdout
    example = re.search(r"hf-dp (plan --n .*)", text)
    assert example
    assert invoke(*example[1].split()).exit_code == 0


def test_plan_answers_without_torch():
    code = (
        "import sys; from hf_dp.cli import app\n"
        f"app({[*BASE, '--epochs', '2', '--noise', '1']!r}, standalone_mode=False)\n"
        "assert 'dp_accounting' in sys.modules\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
