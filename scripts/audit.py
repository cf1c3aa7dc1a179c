"""How tight audits are: what is shown of epsilon beside what is claimed, on Dirac canaries that are in every step.

python scripts/audit.py --figure docs/figures/audit.png
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import nn

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.audit import coins, gaussian_one_run, one_run
from hf_dp.audit.dirac import PLACE, THERE, WithDirac, placed, with_dirac

EPSILONS, DELTA, STEPS = (1.0, 2.0, 4.0, 8.0), 1e-5, 2
BOUNDS = {"Gaussian mechanism (gaussian_one_run)": gaussian_one_run, "any mechanism (one_run)": one_run}


def scores(number: int, epsilon: float) -> tuple[Any, Any]:
    """Of so many canaries, in a training that promises epsilon."""
    included = coins(number)
    # The check before the first step looks at the first row, which is none of them.
    rows = [{PLACE: number, THERE: 1.0}, *({PLACE: i, THERE: float(included[i])} for i in range(number))]
    model = WithDirac(nn.Identity(), number + 1)
    run = PrivateRun(
        model, rows, PrivacyConfig(target_epsilon=epsilon, target_delta=DELTA), placed,
        expected_batch_size=len(rows), micro_batch_size=1000, steps=STEPS,
        loss=with_dirac(lambda model, batch: torch.zeros(())),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    found = model.places.weight.detach()[:number, 0].numpy()
    return found[included], found[~included]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canaries", type=int, default=30_000, help="in each training")
    parser.add_argument("--runs", type=int, default=5, help="for each epsilon")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    logging.getLogger("hf_dp").setLevel(logging.ERROR)
    shown: dict[str, list[list[float]]] = {name: [] for name in BOUNDS}
    for epsilon in EPSILONS:
        each = [scores(given.canaries, epsilon) for _ in range(given.runs)]
        for name, bound in BOUNDS.items():
            found = sorted(bound(*pair, delta=DELTA).epsilon for pair in each)
            shown[name].append(found)
            share = sum(found) / len(found) / epsilon
            listed = ", ".join(f"{value:.2f}" for value in found)
            print(f"epsilon {epsilon:g}: {name}: {listed}; mean over claim {share:.2f}", flush=True)
    if given.figure:
        draw(shown, given.canaries, given.figure)


def draw(shown: dict[str, list[list[float]]], canaries: int, path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(EPSILONS, EPSILONS, color="black", linewidth=1, label="claimed")
    axes.plot(EPSILONS, [e / 2 for e in EPSILONS], color="black", linewidth=1, linestyle=":", label="half of it")
    for (name, runs), color in zip(shown.items(), ("#0072b2", "#d55e00"), strict=True):
        axes.plot(EPSILONS, [sum(found) / len(found) for found in runs], color=color, label=name)
        for epsilon, found in zip(EPSILONS, runs, strict=True):
            axes.scatter([epsilon] * len(found), found, color=color, s=12)
    axes.set(
        title=f"What {canaries:,} Dirac canaries show, confidence 95%", xlabel="claimed epsilon",
        ylabel="epsilon at least", xlim=(0, 8.5), ylim=(0, 8.5),
    )  # fmt: skip
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
