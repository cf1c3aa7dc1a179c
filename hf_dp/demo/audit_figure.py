"""Bounds beside the claim, as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hf_dp.audit.outcome import Audit
from hf_dp.figures import lower, percent, upper

# Of Okabe and Ito's.
_ORANGE, _BLUE = "#d55e00", "#0072b2"


def draw(audit: Audit, claimed: float, path: Path) -> None:
    """Writes what each attack shows, beside what is claimed, as PNG. Needs no display."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(audit.attacks)[::-1]
    bounds = [audit.attacks[name].epsilon for name in names]
    bars = axes.barh(names, bounds, color=_BLUE, height=0.6)
    axes.bar_label(bars, [f"at least {lower(bound, 3)}" for bound in bounds], padding=4, fontsize=8)
    axes.axvline(claimed, color=_ORANGE, label=f"claimed: at most {upper(claimed, 3)}")
    axes.set(
        title=f"What attacks show of epsilon (confidence {percent(audit.confidence)} together)",
        xlabel="epsilon; what is not shown may still be so", xlim=(0, 1.25 * max(claimed, *bounds)),
    )  # fmt: skip
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
