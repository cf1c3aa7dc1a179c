"""What a training logged, step by step: as a table, and as a figure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_dp.config.ranges import is_count, is_number
from hf_dp.errors import LedgerError
from hf_dp.figures import upper

if TYPE_CHECKING:
    from hf_dp.accounting import Ledger
    from hf_dp.hub import PrivacyRecord, Source

_STATE = re.compile(r"(checkpoint-[0-9]{1,18}/)?trainer_state\.json")
_ATTRIBUTES = ("stateful_callbacks", "PrivacyCallback", "attributes")
# Of a checkpoint, and of what `save_state` wrote.
_LEDGERS = ((*_ATTRIBUTES, "saved_ledger", "ledger"), (*_ATTRIBUTES, "spent"))
# The names in the log, and in words.
COLUMNS = {"loss": "training loss", "epsilon": "epsilon", "clipped_fraction": "clipped fraction"}
_PRIVATE = {"loss", "clipped_fraction"}
_SAME_SETTINGS = "By what was promised and released it is of this run; one with equal settings cannot be told from it."
_ROWS = 10
_BLUE, _ORANGE = "#0072b2", "#d55e00"

Steps = dict[int, dict[str, float]]
# An event, how often, and its label.
Charged = tuple[Any, int, str]


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
        if _is_of(record.ledger, state):
            found = _logged(state, record.report.steps)
            longest = max(longest, found, key=lambda steps: max(steps, default=0))
    return longest


def _is_of(ledger: Ledger, state: Any) -> bool:
    """Whether its own ledger has the same promise, and one of the two is the beginning of the other."""
    from hf_dp.accounting import Ledger

    found = [functools.reduce(_field, path, state) for path in _LEDGERS]
    try:
        saved = Ledger.from_dict(next((one for one in found if one is not None), None))
    except (LedgerError, RecursionError):
        return False
    short, long = sorted((saved, ledger), key=lambda one: one.charges)
    return saved.promise == ledger.promise and _begins(short.entries, long.entries)


def _field(of: Any, name: str) -> Any:
    return of.get(name) if isinstance(of, Mapping) else None


def _begins(short: Sequence[Charged], long: Sequence[Charged]) -> bool:
    """Whether the long one goes on from the short one, perhaps amid equal charges."""
    if not short or len(short) > len(long):
        return not short
    *before, (event, count, label) = short
    goes_on, at_most, as_what = long[len(before)]
    return list(long[: len(before)]) == before and (event, label) == (goes_on, as_what) and count <= at_most


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
        caption=_note(names := _known(steps)),
    )
    for column in ("step", *(COLUMNS[name] for name in names)):
        table.add_column(column, justify="right")
    logged, rows = list(steps), min(_ROWS, len(steps))
    for step in dict.fromkeys(logged[i * (len(logged) - 1) // max(1, rows - 1)] for i in range(rows)):
        table.add_row(str(step), *(_told(n, steps[step].get(n)) for n in names))
    return table


def _note(names: Sequence[str]) -> str:
    private = " and ".join(COLUMNS[name] for name in names if name in _PRIVATE)
    said = f"Not private, exact numbers of the data: {private}. Keep them to yourself. " if private else ""
    return said + _SAME_SETTINGS


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
        if name == "epsilon" and budget is not None:
            axes.axhline(budget, color=_ORANGE, linewidth=1, label="budget")
            axes.legend()
        # After the budget, which is to be seen.
        if name != "loss":
            axes.set_ylim(0, None if name == "epsilon" else 1)
    figure.supxlabel("\n".join(wrap(_note(names), 45 * len(names))), fontsize="small")
    written(figure, path, "--figure")
