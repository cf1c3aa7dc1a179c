"""Figures of docs that show a page's tables, drawn from these tables, so that neither says what the other does not.

python scripts/figures.py
"""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
Tables = dict[str, tuple[list[str], dict[str, list[float]]]]
TABLE = re.compile(r"^\*\*(?P<title>[^*]+)\*\*[^|]*\n\n(?P<rows>(?:\|.*\n)+)", re.M)
# Page, the heading that the tables are under, what their numbers are, figure, how many panels lie side by side, and the
# scale of all of them, so that what is flat looks flat; without one columns are amounts, and each begins at 0.
DRAWN = (
    ("choosing.md", "Curves", "held-out loss, nats", "choosing.png", 2, (0.7, 1.9)),
    ("benchmarks.md", "Scaling", "seconds a step", "scaling.png", 3, None),
)


def tables(page: str, heading: str) -> Tables:
    """Of each table under a heading, by the bold words before it: its columns, and the first number of each cell."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", page, re.M | re.S)
    found = {}
    for table in TABLE.finditer(section):
        first, _, *rows = ([cell.strip() for cell in row[1:-1].split("|")] for row in table["rows"].splitlines())
        lines = {name: [float(cell.split()[0]) for cell in cells] for name, *cells in rows}
        found[table["title"].rstrip(":")] = first[1:], lines
    return found


def drawn(panels: Tables, what: str, beside: int, scale: tuple[float, float] | None) -> Figure:
    """A panel for each table: a line for each row, over the columns that have a number, and points over the others."""
    below = math.ceil(len(panels) / beside)
    figure = Figure(figsize=(9, 0.6 + 2.6 * below), layout="constrained")
    axes = list(FigureCanvasAgg(figure).figure.subplots(below, beside, squeeze=False).flat)
    for (title, (columns, lines)), axis in zip(panels.items(), axes, strict=False):
        places = [float(column) if scale is None else at for at, column in enumerate(columns)]
        joined = sum(column[0].isdigit() for column in columns)
        for name, numbers in lines.items():
            (dots,) = axis.plot(places, numbers, "o", markersize=4, label=name)
            axis.plot(places[:joined], numbers[:joined], color=dots.get_color())
        axis.set_title(title, fontsize="medium")
        if len(lines) > 1:
            axis.legend(fontsize="small", loc="lower left" if scale else "best")
        if scale is not None:
            axis.set_xticks(places, [textwrap.fill(column, 10) for column in columns], fontsize="small")
        elif places[-1] > 1000 * places[0]:
            axis.set_xscale("log")
        else:
            axis.set_xticks(places)
        axis.set_ylim(scale or (0, 1.1 * axis.dataLim.y1))
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.supylabel(what)
    return figure


def main() -> None:
    """Draws all of them again."""
    for page, heading, what, name, beside, scale in DRAWN:
        panels = tables((DOCS / page).read_text(encoding="utf-8"), heading)
        drawn(panels, what, beside, scale).savefig(DOCS / "figures" / name, dpi=110)


if __name__ == "__main__":
    main()
