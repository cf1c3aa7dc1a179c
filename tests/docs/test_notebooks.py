"""The notebooks of the tutorials are their pages, and run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.docs.bases import QUICK, publish_bases, quickly
from tests.hub.server import TOKEN, Hub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(QUICK.keys() - {"README"}))
def test_a_notebook_is_its_page(name: str, script: Any) -> None:
    kept = nbformat.read(script.path_of(name), 4)
    nbformat.validate(kept)
    assert script.sources(kept) == script.sources(script.notebook_of(page(name))), "run scripts/notebooks.py"
    outputs = [output for cell in kept["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]


def test_negative_control_a_page_that_moved_on_is_noticed(script: Any) -> None:
    kept, changed = nbformat.read(script.path_of("classifier"), 4), page("classifier").replace("epsilon=8", "epsilon=9")
    assert script.sources(kept) != script.sources(script.notebook_of(changed))


@pytest.mark.slow  # the cells are those of the pages, which test_snippets.py runs
@pytest.mark.parametrize("name", ["classifier", "tutorial"])
def test_a_notebook_runs_in_a_kernel_of_its_own(name: str, script: Any, tmp_path: Path) -> None:
    hub, text = Hub(), page(name)
    publish_bases(hub, name, text, tmp_path / "base")
    made = script.notebook_of(quickly(name, text))
    try:
        script.executed(made, tmp_path, script.of_this_machine(hub.endpoint, TOKEN, tmp_path))
    finally:
        hub.close()
    counts = [cell["execution_count"] for cell in made["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    said = "".join(o.get("text", "") for cell in made["cells"] for o in cell.get("outputs", []))
    assert "Differential privacy: epsilon" in said
    assert "proven" in said or "holds" in said or "verif" in said.lower()
