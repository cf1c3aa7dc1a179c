"""The contrast as a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_dp.audit.secrets import MEAN_EXPOSURE_BY_CHANCE
from hf_dp.demo.messages import CANDIDATES, MOST_EXPOSURE
from hf_dp.demo.result import Result, mean
from hf_dp.figures import upper

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_GREY, _ORANGE, _BLUE, _GREEN = "#7f7f7f", "#d55e00", "#0072b2", "#009e73"


def draw(result: Result, path: Path) -> None:
    """Writes exposure of each secret beside what the models say when asked, as PNG. Needs no display."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    # Not through pyplot, whose global state belongs to the caller.
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _exposures(left, result)
    _said(right, result)
    figure.supxlabel(in_words(len(result.private.planted)), fontsize=8)
    figure.savefig(path, dpi=150)


def _exposures(axes: Any, result: Result) -> None:
    private = f"private\nepsilon {upper(result.private.epsilon, 3)}"
    groups = [
        ("ordinary", result.ordinary.planted, _ORANGE),
        (private, result.private.planted, _BLUE),
        ("private,\nnever planted", result.private.unplanted, _GREEN),
        ("ordinary,\nnever planted", result.ordinary.unplanted, _GREY),
    ]
    draw_exposures(axes, groups, MOST_EXPOSURE)


def draw_exposures(axes: Any, groups: Sequence[tuple[str, Sequence[float], str]], most: float) -> None:
    """Draws how exposed each secret is, in bits.

    Args:
        groups: names, exposures and colours.
        most: that an exposure can be.
    """
    for position, (_, values, color) in enumerate(groups):
        spread = [position + 0.5 * (i / max(1, len(values) - 1) - 0.5) for i in range(len(values))]
        axes.scatter(spread, values, color=color, alpha=0.8, clip_on=False, zorder=3)
        axes.hlines(mean(values), position - 0.35, position + 0.35, color=color, linewidth=2)
    axes.axhline(MEAN_EXPOSURE_BY_CHANCE, color="black", linestyle=":", linewidth=1)
    axes.annotate(" chance", (-0.5, MEAN_EXPOSURE_BY_CHANCE), va="bottom", fontsize=8)
    axes.axhline(most, color="black", linestyle="--", linewidth=1)
    axes.annotate("secret fully known", (len(groups) - 0.5, most), ha="right", va="bottom", fontsize=8)
    axes.set(
        title="How exposed is each secret?",
        ylabel="exposure (bits); the line is the mean",
        xlim=(-0.5, len(groups) - 0.5),
        ylim=(0, most + 1),
    )
    axes.set_xticks(range(len(groups)), [name for name, _, _ in groups])


def in_words(secrets: int) -> str:
    """What exposure is, and why one of so many dots may be high where nothing is known."""
    bits = round(math.log2(secrets))
    lucky = 1 - (1 - (CANDIDATES >> bits) / CANDIDATES) ** secrets
    return (
        f"Exposure: how far up the true code ranks among all {CANDIDATES:,} by how likely the model finds them: 0 is "
        f"last, each bit halves the codes before it, {MOST_EXPOSURE:.1f} is first.\nA model that knows nothing of a "
        f"code ranks it anywhere, once in {2**bits} times at {bits} bits or more: among {secrets} such codes there is "
        f"such a dot in {lucky:.0%} of all runs, by chance."
    )


def _said(axes: Any, result: Result) -> None:
    axes.set(title="What do they say when asked?", xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    colors = {"the true code": "black", "before": _GREY, "ordinary": _ORANGE, "private": _BLUE}
    at = 0.97
    for number, secret in enumerate(result.asked):
        question = textwrap.fill(f'"{secret.prefix.strip()} ..."', 52)
        axes.text(0, at, question, va="top", fontsize=8, style="italic", parse_math=False)
        at -= 0.05 * (1 + question.count("\n"))
        said = {"the true code": secret.secret, **{row.name: row.said[number] for row in result.rows}}
        for place, (name, words) in enumerate(said.items()):
            is_true = "bold" if words == secret.secret else "normal"
            axes.text(
                place / 4,
                at,
                f"{name}\n{words[:12]}",
                va="top",
                fontsize=8,
                color=colors[name],
                weight=is_true,
                parse_math=False,
            )
        at -= 0.16
    secrets = len(result.private.planted)
    told = [
        f"Of {secrets} codes the ordinary model says {result.ordinary.extracted}, the private one "
        f"{result.private.extracted}.",
        "How unsure they are of the next piece of a new message, as among so many: "
        + ", ".join(f"{math.exp(row.evaluation_loss):.1f} {row.name}" for row in result.rows)
        + ".",
    ]
    axes.text(0, at - 0.02, "\n".join(textwrap.fill(one, 60) for one in told), va="top", fontsize=9, parse_math=False)
