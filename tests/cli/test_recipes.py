"""`hf-dp recipes`, and recipes by their names: those that come with the package, in a checkout and installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dp.cli import app, shipped
from tests.conftest import ROOT

RECIPES = ROOT / "recipes"
SCRIPT = "import sys\nprint(__file__, *sys.argv[1:])\n"


def invoke(*args):
    return CliRunner().invoke(app, list(map(str, args)), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipes of a package without a repository, and nothing of one."""
    folder = tmp_path / "site-packages" / "hf_dp" / "_recipes"
    (folder / "common").mkdir(parents=True)
    (folder / "common" / "arguments.py").write_text("")
    (folder / "mine.py").write_text(SCRIPT)
    (folder / "mine.yaml").write_text("output_dir: out\n")
    monkeypatch.setattr(shipped, "_PACKAGE", folder.parent)
    return folder


def test_all_are_listed_with_what_they_do():
    said = invoke("recipes", "list")
    assert said.exit_code == 0, said.output
    words = said.output.replace(",", "").split()
    assert {path.stem for path in RECIPES.glob("*.yaml")} <= set(words)
    assert "own_loop (a script to copy)" in said.output
    assert "Descriptions of tables (E2E NLG)" in said.output


def test_a_copy_of_one_is_its_settings_its_script_and_what_all_share(tmp_path):
    said = invoke("recipes", "copy", "classify_lora", tmp_path / "mine")
    assert said.exit_code == 0, said.output
    found = files(tmp_path / "mine")
    assert {name for name in found if "/" not in name} == {"classify_lora.yaml", "classify.py"}
    assert found == {name: content for name, content in files(RECIPES).items() if name in found}
    assert {name for name in files(RECIPES) if name.startswith("common/")} < set(found)
    # Another one goes beside it.
    assert invoke("recipes", "copy", "own_loop", "instruct", tmp_path / "mine").exit_code == 0
    assert {"own_loop.py", "instruct.py", "instruct.yaml"} <= set(files(tmp_path / "mine"))


def test_without_a_name_all_are_copied(tmp_path):
    assert invoke("recipes", "copy", tmp_path / "mine").exit_code == 0
    assert files(tmp_path / "mine") == files(RECIPES)


def test_what_was_changed_is_not_written_over(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "rates.py").write_text("mine")
    said = invoke("recipes", "copy", "classify", tmp_path)
    assert said.exit_code == 2
    assert f"{str(tmp_path / 'common' / 'rates.py')!r} is there, and is another" in said.stderr
    assert files(tmp_path) == {"common/rates.py": b"mine"}


@pytest.mark.parametrize("name", ["classify.py", "common", "common/rates.py", "common/metrics"])
@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_through_a_link(name, there, tmp_path):
    target, directory = tmp_path / "elsewhere", tmp_path / "mine"
    if there:
        # With what would be written: a link to it is as much another's.
        copy = shutil.copytree if (RECIPES / name).is_dir() else shutil.copy
        copy(RECIPES / name, target)
    (directory / name).parent.mkdir(parents=True)
    (directory / name).symlink_to(target)
    before = files(tmp_path)
    said = invoke("recipes", "copy", "classify", directory)
    assert said.exit_code == 2
    assert f"{str(directory / name)!r} is a link" in said.stderr
    assert files(tmp_path) == before


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "common").write_text("mine")
    said = invoke("recipes", "copy", "classify", tmp_path)
    assert (said.exit_code, files(tmp_path)) == (2, {"common": b"mine"})
    assert "is no directory" in said.stderr
    # All of them, where the name is said to be a place.
    assert invoke("recipes", "copy", tmp_path / "classify").exit_code == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("train", "clasify"), "no recipe is called 'clasify'"),
        (("recipes", "copy", "clasify", "out"), "no recipe is called 'clasify'"),
        (("recipes", "copy", "/abs/foo", "out"), "no recipe is called '/abs/foo'"),
        (("recipes", "copy", "../recipes/classify", "out"), "no recipe is called '../recipes/classify'"),
        (("recipes", "copy", "common/../classify", "out"), "no recipe is called 'common/../classify'"),
        (("recipes", "copy", "", "out"), "no recipe is called ''"),
        (("recipes", "copy", "classify"), "'classify' is a recipe, and no directory is given"),
        (("train", "own_loop"), "the recipe 'own_loop' has no settings"),
        (("train", "own-loop"), "the recipe 'own_loop' has no settings"),
        (("train", "clas-sify"), "no recipe is called 'clas-sify'"),
        (("train", "common"), "no recipe is called 'common'"),
    ],
)
def test_a_name_that_is_none_is_refused(words, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = invoke(*words)
    assert said.exit_code == 2
    assert found in said.stderr
    assert "hf-dp recipes" in said.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [(), ("--help",), ("--use_cpu", "true")])
def test_a_recipe_of_the_package_runs_by_its_name(options, installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = invoke("train", "mine", *options)
    assert said.exit_code == 0, said.output
    assert said.stdout.split() == [str(installed / "mine.py"), str(installed / "mine.yaml"), *options]


def test_a_file_is_given_by_its_path_and_a_name_is_no_file(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "mine.yaml"):
        shutil.copy(installed / name, tmp_path)
    assert invoke("train", "mine.yaml").stdout.split() == ["mine.py", "mine.yaml"]
    assert invoke("train", "mine").stdout.split()[0] == str(installed / "mine.py")


def test_help_is_of_the_command_where_there_is_no_recipe():
    said = invoke("train", "--help")
    assert said.exit_code == 0
    assert "hf-dp train causal_lm" in said.output
    assert invoke("train").exit_code == 2


def test_a_package_without_its_recipes_says_so(installed):
    shutil.rmtree(installed)
    # Another package's `recipes` beside it is none of ours.
    (installed.parents[1] / "recipes").mkdir()
    said = invoke("train", "mine")
    assert said.exit_code == 2
    assert "has no recipes" in said.stderr


def test_no_path_is_left_behind(installed):
    before = list(sys.path)
    assert invoke("train", "mine").exit_code == 0
    assert sys.path == before
