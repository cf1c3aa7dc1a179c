"""What contributors are told: targets, hooks and templates are those that there are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_help_names_every_target() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.M)
    assert phony is not None
    assert set(re.findall(r"^make (\w+)", said, re.M)) == set(phony[1].split())


def test_the_hooks_run_what_make_lint_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = [hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert lint is not None
    linted = [line.replace(" --check", "").removesuffix(" .") for line in re.findall(r"\$\(BIN\)/(.*)", lint[1])]
    assert hooks == linted


def test_templates_ask_whether_the_promise_changes() -> None:
    folder = ROOT / ".github"
    for template in (folder / "PULL_REQUEST_TEMPLATE.md", *(folder / "ISSUE_TEMPLATE").glob("*.md")):
        assert re.search(r"\*\*Does (it|the promise) (touch|change).*\?\*\*", template.read_text(encoding="utf-8")), (
            template
        )
    for template in (folder / "ISSUE_TEMPLATE").glob("*.md"):
        fields = yaml.safe_load(template.read_text(encoding="utf-8").split("---\n")[1])
        assert set(fields) == {"name", "about"}
