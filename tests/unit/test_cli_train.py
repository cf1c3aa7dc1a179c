"""`hf-dp train`: which script a YAML file runs, and that what goes wrong is said without a traceback."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dp.cli import app
from hf_dp.cli.train import recipe_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import neighbour
from hf_dp.errors import ConfigurationError
if "--refuse" in sys.argv:
    raise ConfigurationError("a thing.", why="it is wrong.", fix="make it right.")
if "--missing" in sys.argv:
    open("/nowhere/at/all")
if "--leave" in sys.argv:
    sys.exit(3)
if "--bug" in sys.argv:
    raise ZeroDivisionError("a bug")
print(__name__, neighbour.NAME, *sys.argv[1:])
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'\n")
    (tmp_path / "mine.yaml").write_text("epsilon: 3\n")
    (tmp_path / "other.yaml").write_text("recipe: mine\nepsilon: 3\n")
    yield tmp_path / "mine.yaml"
    sys.modules.pop("neighbour", None)


def invoke(*args):
    return CliRunner().invoke(app, ["train", *map(str, args)], env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def test_the_script_beside_the_file_runs_as_a_program_with_flags(recipe):
    before = list(sys.argv), list(sys.path)
    said = invoke(recipe, "--target_epsilon", "3", "--use_cpu", "True")
    assert said.exit_code == 0, said.output
    assert said.stdout == f"__main__ neighbour {recipe} --target_epsilon 3 --use_cpu True\n"
    assert (sys.argv, sys.path) == before
    assert invoke(recipe.with_name("other.yaml")).exit_code == 0


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_has_its_script_and_names_it_in_its_first_line(path):
    script = recipe_script(path)
    assert f"recipes/{script.name} recipes/{path.name}" in path.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("flag", "code", "words"),
    [
        ("--refuse", 2, "Refused: a thing.\n  Why this is refused: it is wrong.\n  What to do: make it right."),
        ("--missing", 2, "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'"),
        ("--leave", 3, ""),
    ],
)
def test_what_the_recipe_refuses_is_said_in_words(recipe, flag, code, words):
    said = invoke(recipe, flag)
    assert said.exit_code == code
    assert words in said.stderr
    assert "Traceback" not in said.output


def test_a_bug_in_a_recipe_keeps_its_traceback(recipe):
    assert isinstance(invoke(recipe, "--bug").exception, ZeroDivisionError)
    assert isinstance(invoke("--traceback", recipe, "--missing").exception, FileNotFoundError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("a: [", "cannot be read"),
        ("- 1\n", "has no settings"),
        ("", "has no settings"),
        ("recipe: ../mine.py\n", "has recipe: '../mine.py'"),
        ("recipe: 3\n", "has recipe: 3"),
        ("recipe: nothing\n", "there is no nothing.py beside"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(recipe, text, words):
    path = recipe.with_name("wrong.yaml")
    if text is not None:
        path.write_text(text)
    said = invoke(path)
    assert said.exit_code == 2
    assert words in said.stderr
    assert "What to do:" in said.stderr
