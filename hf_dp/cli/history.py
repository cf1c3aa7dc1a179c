"""What a training logged, step by step: as a table, and as a figure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_dp.config.ranges import is_count, is_number
from hf_dp.figures import upper

if TYPE_CHECKING:
    from hf_dp.hub import PrivacyRecord, Source

_STATE = re.compile(r"(checkpoint-[0-9]{1,18}/)?trainer_state\.json")
_LEDGER = ("stateful_callbacks", "PrivacyCallback", "attributes", "saved_ledger", "ledger", "promise")
# The names in the log, and in words.
COLUMNS = {"loss": "training loss", "epsilon": "epsilon", "clipped_fraction": "clipped fraction"}
_ROWS = 10
_BLUE, _ORANGE = "#0072b2", "#d55e00"

Steps = dict[int, dict[str, float]]


def history(source: Source, record: PrivacyRecord) -> Steps:
    """Of each step that was logged the numbers that there are; nothing where no `trainer_state.json` is of this run.

    Args:
        source: an output folder, a checkpoint, or a repository.
        record: of the model that is spoken of.
    """
    longest: Steps = {}
    for name in filter(_STATE.fullmatch, sorted(source.names)):
        try:
            state: Any = json.loads(source.path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        # What it logged tells nothing that is relied on: one that cannot be read, or of another run, is left out.
        if _of(state) == record.ledger.promise:
            found = _logged(state, record.report.steps)
            longest = max(longest, found, key=lambda steps: max(steps, default=0))
    return longest


def _of(state: Any) -> Any:
    """The promise under which it was saved."""
    for name in _LEDGER:
        state = state.get(name) if isinstance(state, Mapping) else None
    return state


def _logged(state: Mapping[str, Any], last: int) -> Steps:
    entries = state.get("log_history")
    found: Steps = {}
    for entry in entries if isinstance(entries, list) else []:
        step: Any = entry.get("step") if isinstance(entry, Mapping) else None
        if is_count(step, at_least=1) and step <= last:
            numbers = {name: float(entry[name]) for name in COLUMNS if is_number(entry.get(name))}
            found[step] = {**found.get(step, {}), **numbers}
    return {step: numbers for step, numbers in sorted(found.items()) if numbers}


def history_table(steps: Steps) -> Table:
    """At most ten steps, from the first that was logged to the last."""
    table = Table(
        title="What was logged",
        title_justify="left",
        caption="Loss and clipped fraction are exact numbers of the private data: keep them to yourself.",
    )
    names = _known(steps)
    for column in ("step", *(COLUMNS[name] for name in names)):
        table.add_column(column, justify="right")
    logged, rows = list(steps), min(_ROWS, len(steps))
    for step in dict.fromkeys(logged[i * (len(logged) - 1) // max(1, rows - 1)] for i in range(rows)):
        table.add_row(str(step), *(_told(n, steps[step].get(n)) for n in names))
    return table


def _told(name: str, number: float | None) -> str:
    if number is None:
        return "-"
    return upper(number, 4) if name == "epsilon" else f"{number:.4g}"


def _known(steps: Steps) -> Sequence[str]:
    return [name for name in COLUMNS if any(name in numbers for numbers in steps.values())]


def draw_history(steps: Steps, budget: float | None, path: Path) -> None:
    """Writes training loss, epsilon and clipped fraction over the steps, whichever there are.

    Args:
        budget: the target epsilon, if there is one.
        path: whose ending says in which format.
    """
    from hf_dp.cli.plot import canvas, written

    names = _known(steps)
    figure = canvas((4.2 * len(names), 3.6))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        points = [(step, numbers[name]) for step, numbers in steps.items() if name in numbers]
        axes.plot(*zip(*points, strict=True), color=_BLUE, marker=".")
        axes.set(xlabel="step", ylabel=COLUMNS[name])
        if name != "loss":
            axes.set_ylim(0, None if name == "epsilon" else 1)
        if name == "epsilon" and budget is not None:
            axes.axhline(budget, color=_ORANGE, linewidth=1, label="budget")
            axes.legend()
    written(figure, path, "--figure")
