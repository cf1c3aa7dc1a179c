"""Help, completion, and what is said where an argument is missing."""

import inspect
import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hf_dp.cli import app
from tests.cli.typed import invoke


@pytest.mark.parametrize("command", ["report", "train", "verify"])
@pytest.mark.parametrize("nothing", [[], ["--"]])
def test_a_command_without_its_argument_names_it(command, nothing):
    result = invoke(command, *nothing)
    assert result.exit_code == 2
    assert "Missing argument" in result.stderr


def test_a_missing_option_exits_with_code_2():
    assert invoke("plan", "--n", "100").exit_code == 2


@pytest.mark.slow
def test_help_teaches_with_an_example_that_runs():
    text = invoke("plan", "--help").stdout
    example = re.search(r"hf-dp (plan --n .*)", text)
    assert example
    assert invoke(*example[1].split()).exit_code == 0


def test_completion_is_offered():
    assert "--install-completion" in invoke("--help").stdout
    assert invoke("--version").stdout.startswith("hf-dp ")
    completed = CliRunner().invoke(
        app,
        [],
        env={"_HF_DP_COMPLETE": "complete_bash", "COMP_WORDS": "hf-dp ver", "COMP_CWORD": "1"},
        prog_name="hf-dp",
    )
    assert "verify" in completed.stdout


@pytest.mark.parametrize("command", ["demo", "plan", "size", "train", "report", "verify"])
def test_every_command_has_help(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"hf-dp {command} " in result.stdout
    assert "Exit codes:" in result.stdout
    assert "--json" in result.stdout


def test_help_breaks_no_line_in_two_on_ordinary_terminals():
    """Typer keeps the line ends of a docstring: of a paragraph of several lines each must fit into 80 columns."""
    root = get_command(app)
    for command in (root, *root.commands.values(), *root.commands["recipes"].commands.values()):
        paragraphs = inspect.cleandoc(command.help).split("\n\n")
        assert [line for text in paragraphs if "\n" in text for line in text.splitlines() if len(line) > 78] == []
