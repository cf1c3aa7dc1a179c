"""What runs elsewhere is what runs here: workflows call make targets, with pinned actions and few rights.

And what a release must agree in, which scripts/release.py looks at before anything is built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
PINNED = re.compile(r"^ *-? *uses: [\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")
MAY_WRITE = {"release.yml": {"publish": {"id-token", "attestations"}}}
KINDS = ("privacy", "added", "changed", "fixed")


def wrong(name: str, text: str) -> list[str]:
    """What is not as a workflow of ours must be."""
    read: dict[str, Any] = yaml.safe_load(text)
    found = [
        f"{line.strip()} is not pinned" for line in text.splitlines() if "uses:" in line and not PINNED.match(line)
    ]
    for job, what in read["jobs"].items():
        rights = {right for right, way in what.get("permissions", read.get("permissions")).items() if way != "read"}
        if rights - MAY_WRITE.get(name, {}).get(job, set()):
            found.append(f"{job} may write {sorted(rights)}")
        if rights and any("run" in step or "checkout" in step["uses"] for step in what["steps"]):
            found.append(f"{job} may write {sorted(rights)}, and runs what is in the repository")
        if "timeout-minutes" not in what:
            found.append(f"{job} has no end")
        for step in what["steps"]:
            if "run" in step and not re.fullmatch(r"make ([a-z]+)( [A-Z]+=.*)?", step["run"]):
                found.append(f"{job} runs {step['run']}, which is no target of make")
            elif "run" in step and step["run"].split()[1] not in TARGETS:
                found.append(f"there is no {step['run']}")
            if "${{" in step.get("run", ""):
                found.append(f"{job} puts what others wrote into a shell")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_make_with_pinned_actions_and_few_rights(path: Path) -> None:
    assert wrong(path.name, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("right", "changed", "words"),
    [
        ("make lint", "make linted", "there is no make linted"),
        ("make lint", "ruff check .", "no target of make"),
        ("make lint", "make check ROOM=${{ github.head_ref }}", "what others wrote"),
        ("@1af3b93b6815bc44a9784bd300feb67ff0d1eeb3 # v6.0.0", "@v6", "is not pinned"),
        ("contents: read", "contents: write", "may write ['contents']"),
        ("    timeout-minutes: 20\n", "", "has no end"),
    ],
)
def test_a_workflow_that_is_not_so_is_found(right: str, changed: str, words: str) -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert right in text
    assert any(words in found for found in wrong("ci.yml", text.replace(right, changed, 1)))


def test_all_that_make_test_runs_runs_for_each_change_and_releases_for_tags_alone() -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in WORKFLOWS}
    called = {name: set(re.findall(r"- run: make (\w+)", text)) for name, text in texts.items()}
    assert called["ci"] == {"lint", "docs", "pytest", "installed"}
    assert {"oldest", "slow"} == called["nightly"]
    assert {"releasable", "test", "installed"} == called["release"]
    # YAML reads `on` as a truth.
    triggers = {name: yaml.safe_load(text)[True] for name, text in texts.items()}
    assert triggers["release"] == {"push": {"tags": ["v*"]}}
    assert "pull_request_target" not in str(triggers)


def test_every_change_has_a_file_of_a_known_kind() -> None:
    for path in (ROOT / "changelog.d").iterdir():
        known = rf"README\.md|\+[a-z0-9-]+\.({'|'.join(KINDS)})\.md"
        assert re.fullmatch(known, path.name), f"changelog.d/{path.name}: see changelog.d/README.md"
        assert not path.read_text(encoding="utf-8").startswith(("-", "*")), f"{path.name}: the bullet is made"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    assert tuple(kind["directory"] for kind in settings["type"]) == KINDS
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count(settings["start_string"]) == 1


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository that may be released as 1.2.3."""
    for path in ("pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / path, tmp_path)
    (tmp_path / "hf_dp").mkdir()
    (tmp_path / "hf_dp" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "README.md").write_text("")
    changes = "# Changelog\n\n## [1.2.3] - 2030-01-02\n\n### Fixed\n\n- This.\n\n## [1.2.2] - 2029-01-01\n\n- That.\n"
    (tmp_path / "CHANGELOG.md").write_text(changes)
    text = (tmp_path / "CITATION.cff").read_text()
    text = re.sub(r"(?m)^version: .*$", "version: 1.2.3", text)
    (tmp_path / "CITATION.cff").write_text(re.sub(r"(?m)^date-released: .*$", "date-released: 2030-01-02", text))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "right", "changed", "words"),
    [
        (None, "", "", None),
        ("hf_dp/__init__.py", "1.2.3", "1.2.4", "the tag is v1.2.3, the version 1.2.4"),
        ("hf_dp/__init__.py", "1.2.3", "1.2.3.dev0", "is no version of a release"),
        ("CHANGELOG.md", "[1.2.3] - 2030-01-02", "[Unreleased]", "begins with [Unreleased], dated nowhere"),
        ("CHANGELOG.md", "- This", "No significant changes", "says nothing under [1.2.3] - 2030-01-02"),
        ("CHANGELOG.md", "## [1.2.2] - 2029-01-01", "## [Unreleased]", "has [Unreleased] without a date"),
        ("CHANGELOG.md", "## [1.2.2] - 2029-01-01", "## Unreleased", "has Unreleased without a date"),
        ("CHANGELOG.md", "[1.2.2] - 2029-01-01", "[1.2.2] - soon", "has [1.2.2] - soon without a date"),
        ("CITATION.cff", "2030-01-02", "2030-01-03", "CITATION.cff has 1.2.3 of 2030-01-03"),
        ("changelog.d/+new.added.md", "", "New.", "+new.added.md is in changelog.d"),
        ("pyproject.toml", 'Issues = "https://github.com/', 'Issues = "https://github.org/', "https://github.org/"),
        ("CITATION.cff", "code: https://github.com/", "code: https://github.org/", "is named, and this is"),
        ("pyproject.toml", "](https://github.com/", "](https://github.org/", "https://github.org/"),
    ],
)
def test_a_release_agrees_in_version_date_and_address(
    path: str | None, right: str, changed: str, words: str | None, released: Path, script: Any
) -> None:
    if path is not None:
        before = (released / path).read_text() if (released / path).exists() else ""
        assert right in before
        (released / path).write_text(before.replace(right, changed, 1) if before else changed)
    repository = script.addresses()[0]
    found = script.disagreements("v1.2.3", repository, released)
    assert found == [] if words is None else any(words in problem for problem in found), found
    assert script.disagreements("v1.2.3", "https://github.com/somebody/else", released)
    assert script.disagreements("v1.2.2", repository, released)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import release

    return release


def test_what_cites_the_version_has_it(script: Any) -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "dev" in script.version() or f"\nversion: {script.version()}\n" in text
    assert len(set(script.addresses())) > 4
    assert all(address.startswith(script.addresses()[0]) for address in script.addresses())


def test_the_name_of_a_tag_is_no_command(tmp_path: Path) -> None:
    made = tmp_path / "made"
    tag = f'v1"$(touch {made})`touch {made}`; touch {made}; "$(shell touch {made})'
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nprintf '%s|' \"$@\"\n")
    python.chmod(0o755)
    (tmp_path / ".ready").touch()
    make = ["make", "--silent", "--no-print-directory", f"VENV={tmp_path}", "-o", f"{tmp_path}/.ready", "releasable"]
    environment = {**os.environ, "TAG": tag, "REPOSITORY": "b c"}
    said = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == f"scripts/release.py|{tag}|b c|"
    assert not made.exists()
