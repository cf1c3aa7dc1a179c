"""Accuracy or loss for each group of the evaluation data: privacy costs small groups most, and a mean hides it.

The evaluation data gets no promise: a group's name and value are published as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_dp.errors import ConfigurationError


def report_by_group(
    values: Sequence[float],
    groups: Sequence[str],
    *,
    measure: str,
    larger_is_better: bool,
    directory: Path,
    without_privacy: Sequence[float] | None = None,
) -> None:
    """Prints a table of groups, the largest first, and writes it as `groups.json` and `groups.png` into `directory`.

    Args:
        values: one for each example: 1.0 or 0.0 for accuracy, or its loss.
        groups: each example's group.
        measure: what the values are, for the table: "accuracy" or "loss".
        larger_is_better: for accuracy, not for loss; it decides which group is the worst.
        directory: is made if it does not exist.
        without_privacy: the values of the same examples under a model that was trained without privacy. The gap is
            value - value without privacy, and its standard error that of the paired differences.

    Raises:
        ConfigurationError: nothing to report, sequences of different lengths, or a value that is not finite.
    """
    _check(values, groups, without_privacy)
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(str(group), []).append(index)
    in_order = sorted(members, key=lambda group: (-len(members[group]), group))
    found = [{"group": group, **_summary(values, without_privacy, members[group])} for group in in_order]
    worst = (min if larger_is_better else max)(found, key=lambda row: row["value"])
    whole = {"group": "all", **_summary(values, without_privacy, range(len(values)))}
    directory.mkdir(parents=True, exist_ok=True)
    kept = {"measure": measure, "larger_is_better": larger_is_better, "worst_group": worst["group"]}
    text = json.dumps({**kept, "all": whole, "groups": found}, indent=2, allow_nan=False)
    (directory / "groups.json").write_text(text, encoding="utf-8")
    _draw(found, whole, measure, directory / "groups.png")
    _print([*found, whole], measure, worst)


def _check(values: Sequence[float], groups: Sequence[str], without_privacy: Sequence[float] | None) -> None:
    lengths = [len(part) for part in (values, groups, without_privacy) if part is not None]
    if min(lengths) == 0 or min(lengths) != max(lengths):
        raise ConfigurationError(
            f"a report by group got sequences of lengths {', '.join(map(str, lengths))}.",
            why="a value and a group are needed for each example, of the same examples in the same order.",
            fix="take them all from one evaluation set.",
        )
    if not all(math.isfinite(value) for part in (values, without_privacy or ()) for value in part):
        raise ConfigurationError(
            "a value of an example is not finite.",
            why="its group would have no mean, and leaving it out would flatter the group.",
            fix="look for examples whose loss overflows, or report accuracy.",
        )


def _summary(values: Sequence[float], without: Sequence[float] | None, chosen: Sequence[int]) -> dict[str, Any]:
    mine = [float(values[i]) for i in chosen]
    summary = {"n": len(mine), "value": fmean(mine), "standard_error": _standard_error(mine)}
    if without is None:
        return summary
    other = [float(without[i]) for i in chosen]
    gaps = [a - b for a, b in zip(mine, other, strict=True)]
    return {**summary, "without_privacy": fmean(other), "gap": fmean(gaps), "gap_standard_error": _standard_error(gaps)}


def _standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _print(rows: list[dict[str, Any]], measure: str, worst: dict[str, Any]) -> None:
    compared = "gap" in rows[0]
    table = Table(title=f"{measure} by group", caption=f"worst group: {escape(worst['group'])}, {worst['value']:.3f}")
    table.add_column("group", overflow="fold")
    for name in ("n", measure, *(("without privacy", "gap") if compared else ())):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [escape(row["group"]), str(row["n"]), _with_error(row["value"], row["standard_error"])]
        if compared:
            cells += [f"{row['without_privacy']:.3f}", _with_error(row["gap"], row["gap_standard_error"], "+")]
        table.add_row(*cells, style="bold" if row is worst else None, end_section=row is rows[-2])
    Console().print(table)


def _with_error(value: float, error: float | None, sign: str = "-") -> str:
    return f"{value:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")


def _draw(rows: list[dict[str, Any]], whole: dict[str, Any], measure: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 1.4 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    if "gap" in whole:
        axes.plot([row["without_privacy"] for row in rows], places, "o", mfc="none", label="without privacy")
        axes.axvline(whole["without_privacy"], color="C0", linewidth=0.8, linestyle="--")
    errors = [row["standard_error"] or 0.0 for row in rows]
    axes.errorbar([row["value"] for row in rows], places, xerr=errors, fmt="o", color="C1", label="private")
    axes.axvline(whole["value"], color="C1", linewidth=0.8, label="mean of all examples")
    axes.set_yticks(places, [f"{row['group']} ({row['n']})" for row in rows], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel(f"{measure}, with its standard error")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
