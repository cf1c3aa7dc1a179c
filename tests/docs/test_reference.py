"""The pages of the reference have every public name and every command, as mkdocs puts them in."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.main import get_command

import hf_dp
from hf_dp.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
MODULES = [f"hf_dp.{name}" for name in hf_dp.__all__ if isinstance(getattr(hf_dp, name), ModuleType)]


@pytest.fixture(scope="module")
def hooks() -> Any:
    """As mkdocs imports them."""
    (path,) = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["hooks"]
    spec = importlib.util.spec_from_file_location("hooks", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.parametrize("module", ["hf_dp", *MODULES])
def test_every_public_name_is_on_a_page(module: str, hooks: Any) -> None:
    (page,) = [text for text in PAGES.values() if f"<!-- names of {module} -->" in text]
    home, said = importlib.import_module(module), hooks.on_page_markdown(page)
    found = {name.rpartition(".")[2] for name in re.findall(rf"^::: ({module}\..*)$", said, re.M)}
    assert found >= {name for name in home.__all__ if f"{module}.{name}" not in MODULES} - {"__version__"}
    for name in found:
        value = getattr(home, name, None)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name


def test_every_command_and_option_is_on_a_page(hooks: Any) -> None:
    (page,) = [text for text in PAGES.values() if "<!-- commands -->" in text]
    said = hooks.on_page_markdown(page)
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) >= 7
    for name, command in commands.items():
        (section,) = re.findall(rf"^## `hf-dp {name}`$(.*?)(?=^## |\Z)", said, re.M | re.S)
        for parameter in command.params:
            shown = parameter.opts[0] if parameter.opts[0].startswith("-") else "**Arguments**"
            assert shown in section, (name, parameter.name)


def test_every_field_of_a_record_is_in_a_table() -> None:
    page = PAGES["privacy_json.md"]
    in_tables = {name for cell in re.findall(r"^\| (`.*?) \|", page, re.M) for name in re.findall(r"`(\w+)`", cell)}
    record = json.loads((ROOT / "tests" / "hub" / "dev2" / "capped" / "privacy.json").read_text(encoding="utf-8"))
    assert {*record, *record["mechanism"], *record["ledger"]} | {"earlier", "audit", "saved"} == in_tables
    terms = [value for value in record["mechanism"].values() if isinstance(value, dict)]
    for name in {name for part in (*terms, *record["ledger"]["entries"]) for name in part}:
        assert f"`{name}`" in page or f'"{name}"' in page, name


def test_options_numbers_and_percent_stay_in_one_line(hooks: Any) -> None:
    whole = '<span class="short">{}</span>'.format
    assert hooks.on_page_content("<code>--short</code>") == '<code class="short">--short</code>'
    long = "<code>python recipes/{} --learning_rate 5e-3 -- -o [--x]</code>".format("a" * 32)
    said = hooks.on_page_content(long)
    for part in ("--learning_rate", "5e-3", "-o", "--x"):
        assert whole(part) in said, part
    assert re.sub("<span[^>]*>|</span>", "", said) == long, "what is copied is what was written"
    block = '<div class="language-bash highlight"><code><a id="x-1"></a>hf-dp --flag<span> </span>-o - a-b</code></div>'
    said = hooks.on_page_content(block)
    assert said == block.replace("--flag", whole("--flag")).replace(">-o", f">{whole('-o')}")
    for number in ("2e-16", "91.4 %"):
        said = hooks.on_page_content(f'<td id="{number}">of {number}, 5 %s</td>')
        assert said == f'<td id="{number}">of {whole(number)}, 5 %s</td>'


def test_negative_control_what_nobody_asked_for_is_not_put_in(hooks: Any) -> None:
    assert hooks.on_page_markdown("names of hf_dp, `<!-- commands -->`") == "names of hf_dp, `<!-- commands -->`"


def test_what_searches_find_first_is_there(hooks: Any) -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    sections = re.findall(r"^  - ([A-Z][\w ]*):$", text, re.M)
    assert set(hooks.FIRST) <= set(sections)
    assert all(any(fnmatch(name, pattern) for name in PAGES) for pattern in hooks.LAST)
    found = [hooks.weight("resuming.md", "How to"), hooks.weight("api.md", "Reference"), hooks.weight("index.md", None)]
    assert found == [2, 1, 1]
    assert hooks.weight("rules.md", "How to") < 1
