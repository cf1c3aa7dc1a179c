"""Recipes, run as `hf-dp train` runs them or as scripts, and what they wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir

from typer.testing import CliRunner

from hf_dp.cli import app
from hf_dp.cli.train import recipe_script

ROOT = Path(__file__).resolve().parents[2]


def called(recipe: str, *flags: str, code: int = 0) -> str:
    """What `hf-dp train` prints for a recipe with its own YAML file and flags that win over it."""
    words = ["train", str(ROOT / "recipes" / f"{recipe}.yaml"), "--use_cpu", "True", *flags]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "160", "NO_COLOR": "1"})
    if done.exit_code != code:
        raise AssertionError(done.output[-3000:]) from done.exception
    return done.output


def launched(recipe: str, *flags: str) -> str:
    """What a recipe prints that is run as a script, in a process of its own."""
    settings = ROOT / "recipes" / f"{recipe}.yaml"
    command = [sys.executable, str(recipe_script(settings)), str(settings), *flags, "--use_cpu", "True"]
    done = subprocess.run(command, cwd=gettempdir(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def accuracies(out: Path, measure: str = "accuracy") -> list[float]:
    """Before and after training."""
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return [scores[measure] for scores in results.values()]


def head(source: Path, target: Path, lines: int) -> str:
    with source.open(encoding="utf-8") as file:
        target.write_text("".join(next(file) for _ in range(lines)), encoding="utf-8")
    return str(target)


def groups_of(folder: Path) -> dict:
    return json.loads((folder / "groups.json").read_text(encoding="utf-8"))
