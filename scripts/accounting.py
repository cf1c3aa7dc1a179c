"""Holds epsilon against lower bounds and against other accountants, over a grid of mechanisms from usual to extreme.

    python scripts/accounting.py --figure docs/figures/accounting.png

Prints the table of docs/accounting.md. Minutes; it computes no training.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scipy import optimize, stats  # noqa: E402

from hf_dp.accounting import epsilon, has_renyi  # noqa: E402
from tests.accounting.cases import Case, all_cases  # noqa: E402

# Below, rounding to 1e-13 is what is compared.
_SMALL = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where claims over their lower bounds are drawn")
    parser.add_argument("--only", default="", help="part of the kinds that are computed")
    given = parser.parse_args()
    begun, rows = time.perf_counter(), []
    print(
        "| mechanism | delta | lower bound | PLD | over it | RDP | other |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for case in all_cases():
        if given.only in case.kind:
            rows.append(row := (case, *compared(case)))
            print(told(*row), flush=True)
    found = [(case, claimed / low) for case, low, claimed, _, _ in rows if low > _SMALL]
    print(f"\n{len(rows)} mechanisms, {time.perf_counter() - begun:.0f} s; PLD over its lower bound, at most, by kind:")
    for kind in dict.fromkeys(case.kind for case, _ in found):
        ratio, worst = max(((ratio, case) for case, ratio in found if case.kind == kind), key=lambda pair: pair[0])
        print(f"- {kind}: {ratio:.4f} ({worst.name}, delta {worst.delta:g})")
    below = [case.name for case, low, claimed, _, _ in rows if claimed < low]
    print(f"Claims below a lower bound: {', '.join(below) or 'none'}")
    if given.figure:
        draw(rows, given.figure)


def compared(case: Case) -> tuple[float, float, float | None, str]:
    """A lower bound on epsilon, the claims of both accountants, and what others find."""
    claimed = epsilon(case.event, case.delta)
    rdp = epsilon(case.event, case.delta, "rdp") if has_renyi(case.event) else None
    return case.lower_epsilon(claimed * 1.001), claimed, rdp, others(case)


def others(case: Case) -> str:
    """The closed form of the Gaussian, and prv-accountant where it is installed and rounding leaves it digits."""
    if case.plain is None:
        return ""
    q, noise, steps = case.plain
    if q == 1:
        return f"exact {exact(math.sqrt(steps) / noise, case.delta):.6g}"
    try:
        import prv_accountant
    except ImportError:
        return ""
    if case.delta < 1e-6 or steps > 10_000 or noise < 0.5:
        return ""
    mechanism = prv_accountant.PoissonSubsampledGaussianMechanism(sampling_probability=q, noise_multiplier=noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = prv_accountant.PRVAccountant(
                mechanism, max_self_compositions=steps, eps_error=0.02, delta_error=case.delta / 1000
            )
            low, estimate, high = made.compute_epsilon(case.delta, [steps])
        except (ArithmeticError, ValueError, RuntimeError, MemoryError):
            return "PRV fails"
    return f"PRV {estimate:.5g} ({low:.5g} to {high:.5g})"


def exact(mu: float, delta: float) -> float:
    """Of Gaussians (Balle and Wang 2018, arXiv:1805.06530, theorem 8), in logarithms."""

    def excess(eps: float) -> float:
        upper = stats.norm.logcdf(mu / 2 - eps / mu)
        lower = eps + stats.norm.logcdf(-mu / 2 - eps / mu)
        return float(upper + math.log1p(-math.exp(min(lower - upper, -1e-300))) - math.log(delta))

    return float(optimize.brentq(excess, 0, mu**2 / 2 + 40 * mu, xtol=1e-12))


def told(case: Case, low: float, claimed: float, rdp: float | None, other: str) -> str:
    ratio = f"{claimed / low:.4f}" if low > _SMALL else "-"
    rdp_told = "none" if rdp is None else f"{rdp:.5g}"
    return f"| {case.kind}: {case.name} | {case.delta:g} | {low:.6g} | {claimed:.6g} | {ratio} | {rdp_told} | {other} |"


def draw(rows: list[Any], path: Path) -> None:
    """Each claim over the lower bound, by that."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), constrained_layout=True)
    for kind in dict.fromkeys(case.kind for case, *_ in rows):
        shown = [(low, claimed / low) for case, low, claimed, *_ in rows if case.kind == kind and low > _SMALL]
        axes.scatter(*zip(*shown, strict=True), s=22, label=f"PLD, {kind}")
    shown = [(low, rdp / low) for _, low, _, rdp, _ in rows if rdp is not None and low > _SMALL]
    if shown:
        axes.scatter(*zip(*shown, strict=True), s=14, marker="x", color="grey", label="RDP")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="lower bound on epsilon", ylabel="claimed epsilon over it")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
