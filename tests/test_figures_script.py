"""What scripts/figures.py draws: all tables of a page's section, and no two labels of an axis over one another."""

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_script", ROOT / "scripts" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def over_one_another(figure: Figure) -> list[str]:
    figure.canvas.draw()
    found = []
    for axis in figure.axes:
        boxes = [label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()]
        found += [axis.get_title() for a, b in itertools.pairwise(boxes) if a.overlaps(b)]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("which", "panels"), [(0, 7), (1, 3)])
def test_every_table_is_drawn_and_its_labels_can_be_read(which: int, panels: int, script: ModuleType) -> None:
    page, heading, what, _, *how = script.DRAWN[which]
    tables = script.tables((ROOT / "docs" / page).read_text(encoding="utf-8"), heading)
    assert len(tables) == panels
    assert over_one_another(script.drawn(tables, what, *how)) == []


def test_negative_control_labels_that_lie_over_one_another(script: ModuleType) -> None:
    page = "## Curves\n\n**Rate:**\n\n| | automatically | 10000000000 |" + " 100000000000 |" * 9 + "\n| --- |\n"
    page += "| a |" + " 1.5 (60.0) |" * 11 + "\n"
    tables = script.tables(page, "Curves")
    assert tables["Rate"][1] == {"a": [1.5] * 11}
    assert "Rate" in over_one_another(script.drawn(tables, "loss", 2, (1.1, 1.9)))
