"""`recipes` holds scripts and their settings only, and a script needs nothing beside it but `common`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_dp.cli.train import recipe_script
from tests.test_floors import imports_of

# To be read and copied: it stands alone, without the settings of a file and without what the others share.
ALONE = "own_loop.py"
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def strangers(folder: Path) -> list[str]:
    """What lies in the folder and is neither a script with a YAML file nor one, nor shared; and imports of scripts."""
    scripts = {recipe_script(path) for path in folder.glob("*.yaml")} | {folder / ALONE}
    known = {*scripts, *folder.glob("*.yaml"), folder / "common", folder / "__pycache__"}
    names = {script.stem for script in scripts}
    return [path.name for path in sorted(folder.iterdir()) if path not in known] + [
        f"{path.relative_to(folder)} imports {found.module}"
        for path in sorted({*scripts, *folder.glob("common/**/*.py")})
        for found in imports_of(path, folder)
        if found.module.split(".")[0] in names | ({"common"} if path.name == ALONE else set())
    ]


def test_a_recipe_stands_alone_but_for_what_all_share():
    assert strangers(RECIPES) == []


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("shared.py", "", "shared.py"),
        ("notes.txt", "", "notes.txt"),
        ("common/more.py", "def f():\n    from classify import read\n", "common/more.py imports classify"),
        ("instruct.py", "import causal_lm\n", "instruct.py imports causal_lm"),
        ("own_loop.py", "import common.data\n", "own_loop.py imports common.data"),
    ],
)
def test_the_check_can_fail(path, source, found, tmp_path):
    folder = shutil.copytree(RECIPES, tmp_path / "recipes")
    (folder / path).write_text(source, encoding="utf-8")
    assert strangers(folder) == [found]
