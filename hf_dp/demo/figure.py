"""The contrast as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_dp.audit.secrets import MEAN_EXPOSURE_BY_CHANCE
from hf_dp.demo.messages import MOST_EXPOSURE
from hf_dp.demo.result import Result, mean
from hf_dp.figures import upper

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_GREY, _ORANGE, _BLUE, _GREEN = "#7f7f7f", "#d55e00", "#0072b2", "#009e73"


def draw(result: Result, path: Path) -> None:
    """Writes exposure of each secret beside the evaluation losses, as PNG. Needs no display."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    # Not through pyplot, whose global state belongs to the caller.
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _exposures(left, result)
    _losses(right, result)
    figure.savefig(path, dpi=150)


def _exposures(axes: Any, result: Result) -> None:
    private = f"private\nepsilon {upper(result.private.epsilon, 3)}"
    groups = {
        "ordinary": (result.ordinary.planted, _ORANGE),
        private: (result.private.planted, _BLUE),
        "private,\nnever planted": (result.private.unplanted, _GREEN),
        "ordinary,\nnever planted": (result.ordinary.unplanted, _GREY),
    }
    for position, (values, color) in enumerate(groups.values()):
        spread = [position + 0.5 * (i / max(1, len(values) - 1) - 0.5) for i in range(len(values))]
        axes.scatter(spread, values, color=color, alpha=0.8, clip_on=False, zorder=3)
        axes.hlines(mean(values), position - 0.35, position + 0.35, color=color, linewidth=2)
    axes.axhline(MEAN_EXPOSURE_BY_CHANCE, color="black", linestyle=":", linewidth=1)
    axes.annotate(" chance", (-0.5, MEAN_EXPOSURE_BY_CHANCE), va="bottom", fontsize=8)
    axes.axhline(MOST_EXPOSURE, color="black", linestyle="--", linewidth=1)
    axes.annotate("secret fully known", (len(groups) - 0.5, MOST_EXPOSURE), ha="right", va="bottom", fontsize=8)
    axes.set(
        title="How exposed is each secret?",
        ylabel="exposure (bits); the line is the mean",
        xlim=(-0.5, len(groups) - 0.5),
        ylim=(0, MOST_EXPOSURE + 1),
    )
    axes.set_xticks(range(len(groups)), list(groups))


def _losses(axes: Any, result: Result) -> None:
    values = [row.evaluation_loss for row in result.rows]
    bars = axes.bar(["before", "ordinary", "private"], values, color=[_GREY, _ORANGE, _BLUE], width=0.6)
    axes.bar_label(bars, fmt="%.2f")
    axes.set(title="How well has it learnt?", ylabel="evaluation loss (nats a token); less is better")
    axes.margins(y=0.1)
