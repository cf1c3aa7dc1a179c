"""Every snippet of the README and the docs is executed, page by page, as a reader would.

A page's Python and shell blocks run in their order, in one namespace and one folder. What pages take for granted (a
model, data, a tokenizer) is in `given`. A block is left out only under a comment `<!-- not run: reason -->`.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from hf_dp.cli import app
from tests.docs.bases import LANGUAGE_MODEL, QUICK, publish_bases, quickly
from tests.hub.conftest import hub  # noqa: F401 - a fixture
from tests.hub.server import Hub
from tests.training.workbench import a_tokenizer, classifier, pad, rows

pytestmark = pytest.mark.usefixtures("checked_once")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]*?) -->\n)?^```(?P<kind>\w*| \{.*\})\n(?P<text>.*?)^```$", re.M | re.S
)
SHOWN_ONLY = {"", "text", "yaml", "json"}
# Of libraries beside this one, on the pages of those who come from there: it is Python, and that is all that is known.
THEIRS = " { .python .theirs }"
# They calibrate several times, or train what a fast page trains too (the quick start: README); those who come from
# elsewhere are shown what those who come from Trainer are.
ALIKE = ["from_opacus", "from_fastdp", "from_dp_transformers", "from_opake"]
SLOW = ["explained", "privacy", "privacy_json", "resuming", "choosing_privacy", "settings", "users", "gpus"]
SLOW += ["index", "own_loop", "classifier", "publishing", "tutorial", "audit", "extending", "re_attention"]
SLOW += ["from_trainer", *ALIKE]


class Snippet(NamedTuple):
    kind: str
    text: str
    reason: str | None
    line: int


def snippets(page: Path) -> Iterator[Snippet]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield Snippet(found["kind"], found["text"], found["reason"], text[: found.start("text")].count("\n"))


def given() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": classifier(),
        "train": rows(600),
        "test": rows(20, seed=1),
        "tokenizer": a_tokenizer({"a", "b"}),
        "collator": pad,
    }


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW)) for page in PAGES],
)
def test_the_snippets_of_a_page_run(
    page: Path,
    hub: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if page.stem in QUICK:
        text = page.read_text(encoding="utf-8")
        publish_bases(hub, page.stem, text, tmp_path / "base")
        page = tmp_path / page.name
        page.write_text(quickly(page.stem, text), encoding="utf-8")
    ran(page, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.data
def test_the_tutorial_with_the_real_model(
    hub: Hub,  # noqa: F811
    smollm2_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    page = tmp_path / "tutorial.md"
    page.write_text(text.replace(LANGUAGE_MODEL, str(smollm2_directory.absolute())), encoding="utf-8")
    found = ran(page, tmp_path, monkeypatch)
    before, after = found["losses"]
    assert after < 0.7 * before
    assert found["report"].private
    assert found["report"].epsilon <= 8
    assert (tmp_path / "loss_and_epsilon.png").exists()


def ran(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snippets of a page have left behind, run in a folder."""
    monkeypatch.chdir(folder)
    # Classes that snippets define look for their module.
    namespace: dict[str, Any] = {"__name__": "snippet", **given()}
    monkeypatch.setitem(sys.modules, "snippet", type(sys)("snippet"))
    for snippet in snippets(page):
        if snippet.reason is not None:
            assert snippet.reason.strip(), f"{page.name}:{snippet.line}: say why it is not run"
        elif snippet.kind == "python":
            source = "\n" * snippet.line + snippet.text  # so that tracebacks show the page's own lines
            exec(compile(source, str(page), "exec"), namespace)
        elif snippet.kind == "bash":
            for line in filter(None, snippet.text.splitlines()):
                run(line, f"{page.name}:{snippet.line}")
        elif snippet.kind == THEIRS and page.name.startswith("from_"):
            ast.parse(snippet.text)
        else:
            assert snippet.kind in SHOWN_ONLY, f"{page.name}:{snippet.line}: how is {snippet.kind!r} to be run?"
    return namespace


def run(line: str, where: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    assert program == "hf-dp", f"{where}: {line!r} is neither hf-dp nor marked as not run"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, f"{where}: {line}\n{done.output}"


def test_all_who_come_from_elsewhere_are_shown_the_same() -> None:
    shown = {stem: [s.text for s in snippets(ROOT / f"docs/{stem}.md")] for stem in ["from_trainer", *ALIKE]}
    for theirs, ours in shown.values():
        ast.parse(theirs)
        assert ours == shown["from_trainer"][1]


def test_few_snippets_are_not_run() -> None:
    left_out = [
        (page.name, s.reason)
        for page in PAGES
        for s in snippets(page)
        if s.reason is not None and not s.reason.startswith("by tests/")
    ]
    assert len(left_out) <= 4, left_out
    assert sum(s.kind in ("python", "bash") for page in PAGES for s in snippets(page)) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"^make ([a-z]+)|`make ([a-z]+)[^`]*`", text, re.M):
        assert "".join(target) in targets, target
    for file, name in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)", text):
        assert f"def {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
    for file in re.findall(r"\b((?:recipes(?!/test_)|scripts|tests)/[\w/]+\.(?:py|yaml))", text):
        assert (ROOT / file).exists(), file
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    commands |= {group.name for group in app.registered_groups}
    for command in re.findall(r"\bhf-dp ([a-z][a-z-]*)", text):
        assert command in commands, command


def test_the_words_that_the_faq_answers_are_said_by_the_library() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_dp").rglob("*.py"))
    page = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    quoted, in_table = (re.findall(words, page, re.M) for words in (r"^- `([^`]*)`", r"^\| .* \| `([^`]*)` \|$"))
    assert len(quoted) > 60
    assert len(in_table) > 5
    for words in quoted + in_table:
        assert words in source, words
    for question in re.findall("^### (.*)$", page, re.M):
        assert question.endswith("?"), question


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("```python\n1 / 0\n```\n", "division by zero"),
        ("```bash\nrm -r x\n```\n", "neither hf-dp nor marked"),
        ("```bash\nhf-dp plan --n 1\n```\n", "hf-dp plan --n 1"),
        ("```fish\nls\n```\n", "how is 'fish' to be run"),
    ],
)
def test_a_page_with_a_wrong_snippet_fails(
    text: str,
    words: str,
    hub: Hub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises((AssertionError, ZeroDivisionError), match=words):
        test_the_snippets_of_a_page_run(tmp_path / "page.md", hub, tmp_path, monkeypatch)
