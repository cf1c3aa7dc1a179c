"""What attacks find, one model beside the other, as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_dp.audit.members import Membership
from hf_dp.cli.memorised import Measured
from hf_dp.demo.figure import draw_exposures
from hf_dp.figures import percent

# Of Okabe and Ito's.
_ORANGE, _BLUE, _GREY = "#d55e00", "#0072b2", "#7f7f7f"


def draw(found: Measured, path: Path) -> None:
    """Writes AUCs with their intervals, and exposures where there are secrets, as PNG. Needs no display."""
    exposed = [(_name(found, name), one.secrets) for name, one in found.models.items() if one.secrets is not None]
    figure = Figure(figsize=(11 if exposed else 7, 4.5), layout="constrained")
    # Not through pyplot, whose global state belongs to the caller.
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if exposed else 1, squeeze=False)[0]
    _membership(panels[0], found)
    if exposed:
        most = math.log2(max(count for _, one in exposed for count in one.candidates))
        draw_exposures(panels[1], [(name, one.exposures, _BLUE) for name, one in exposed], most)
    figure.savefig(path, dpi=150)


def _name(found: Measured, name: str) -> str:
    claim = found.claims[name]
    return f"{found.names[name]}\n" + ("no claim" if claim is None else claim.said)


def _membership(axes: Any, found: Measured) -> None:
    names = [_name(found, name) for name in found.models]
    by_loss: list[Membership | None] = [one.by_loss for one in found.models.values()]
    by_reference = [one.by_reference for one in found.models.values()]
    attacks = ("loss", by_loss, _BLUE, -0.1), ("loss, less reference", by_reference, _ORANGE, 0.1)
    for attack, told, color, aside in attacks:
        known = [(at, one) for at, one in enumerate(told) if one is not None]
        if known:
            spans = [[one.auc - one.auc_interval[0], one.auc_interval[1] - one.auc] for _, one in known]
            axes.errorbar(
                [at + aside for at, _ in known], [one.auc for _, one in known], list(zip(*spans, strict=True)),
                fmt="o", color=color, capsize=4, label=attack,
            )  # fmt: skip
    if found.reference is not None:
        low, high = found.reference.auc_interval
        axes.axhspan(low, high, color=_GREY, alpha=0.25, label="reference, by loss (control)")
    axes.axhline(0.5, color="black", linestyle=":", linewidth=1, label="chance")
    confidence = next(iter(found.models.values())).by_loss.confidence
    axes.set(
        title=f"Told from texts that were not in ({percent(confidence)} intervals)", ylabel="AUC",
        xlim=(-0.5, len(names) - 0.5),
    )  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.legend(fontsize=8)
