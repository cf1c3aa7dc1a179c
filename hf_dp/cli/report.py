"""`hf-dp report`: what a run, or a published model, says of its privacy."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_dp.cli.common import AsJson, print_json, refusals
from hf_dp.cli.history import Steps, draw_history, history, history_table
from hf_dp.cli.planned import risk_table
from hf_dp.errors import ConfigurationError

if TYPE_CHECKING:
    from hf_dp.hub import Source

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})/privacy\.json")


def report(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A folder of DPTrainer, a checkpoint, or a repository OWNER/NAME.")
    ],
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw training loss, epsilon and clipped fraction over the steps (PNG, SVG or PDF)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What was promised, what was spent, and on what: read from privacy.json.

    Example:

        hf-dp report out/classify

    In an output folder the newest run speaks, by its model or by the checkpoint
    of the most steps where it was interrupted. The claim is printed as it
    stands; `hf-dp verify` checks it. Where Trainer's log of that run lies
    beside it (trainer_state.json, in each checkpoint, or by
    trainer.save_state()), a table has some of its steps, and --figure draws
    all:

        hf-dp report out/classify --figure run.png

    Exit codes: 0, read; 2, there is no report, or it cannot be read.
    """
    from hf_dp.accounting import in_words
    from hf_dp.accounting.risk import group_epsilons, groups_in_words, rates, risk
    from hf_dp.audit.outcome import LOW_AND_TOLD
    from hf_dp.cli.plot import refuse_no_place
    from hf_dp.errors import shortened
    from hf_dp.hub import RECORD_FILE, open_source

    with refusals():
        if figure is not None:
            refuse_no_place(figure, "--figure")
        source = top = open_source(directory)
        names = [name for name in source.names if name == RECORD_FILE or _CHECKPOINT.fullmatch(name)]
        place = f"{directory}/{chosen.rpartition('/')[0]}" if "/" in (chosen := _chosen(source, names)) else directory
        older = place != directory and RECORD_FILE in source.names
        if place != directory:
            source = open_source(place)
        record = source.record()
        told = rates(record.report.target_tpr, record.report.at_fpr)
        found = risk(record.ledger.event, told) if record.report.private else None
        claim = record.report
        groups = group_epsilons(record.ledger.event, claim.delta, claim.epsilon) if claim.private else {}
        steps = history(top, record)
        if figure is not None:
            _draw(steps, record.config.target_epsilon, figure, directory)
    if as_json:
        said = {"report": record.report.to_dict(), "ledger": record.ledger.to_dict()}
        of_groups = {str(rows): cost for rows, cost in groups.items()}
        logged = {"risk": found and found.to_dict(), "group_epsilons": of_groups, "logged_not_private": steps}
        print_json({"source": place, **said, **logged})
        return
    console = Console(soft_wrap=True)
    besides = f", the newest here; {directory} holds an older model" if older else ""
    console.print(f"{shortened(place)}{shortened(besides)}\n", markup=False, highlight=False)
    console.print(str(record.report), markup=False, highlight=False)
    if record.audit is not None:
        console.print(f"Audited: {record.audit} {LOW_AND_TOLD}", markup=False, highlight=False)
    table = Table(title="Everything that was released of the training data", title_justify="left")
    for column in ("release", "times", "mechanism"):
        table.add_column(column)
    for event, count, label in record.ledger.entries:
        table.add_row(label, str(count), in_words(event))
    Console().print("\n", table)
    if steps:
        Console().print("\n", history_table(steps))
    if found is not None:
        unit = record.config.unit
        one, several = ("example", "training examples") if unit is None else ("unit", f"values of {unit!r}")
        Console().print("\n", risk_table(found.rows(one)))
        Console().print(f"{found.in_words(one)}\n{groups_in_words(groups, several)}", markup=False, highlight=False)


def _draw(steps: Steps, budget: float | None, figure: Path, directory: str) -> None:
    if not steps:
        raise ConfigurationError(
            f"--figure of {directory!r}, where no logged step of this run lies.",
            why="the figure is made of what Trainer logged (trainer_state.json, which is in each checkpoint).",
            fix="train with logging_steps=1 or so (Trainer's own is 500), and name the output folder, where its "
            "checkpoints lie; where there are none, train with save_strategy='steps' (recipes: --save_strategy steps), "
            "or call trainer.save_state() at the end.",
        )
    draw_history(steps, budget, figure)


def _chosen(source: Source, names: list[str]) -> str:
    """Of the newest run; and there, as copying and unpacking change times, of the most steps, the model before others.

    Raises:
        LedgerError: the newest record cannot be read.
    """
    from hf_dp.errors import LedgerError
    from hf_dp.hub import PrivacyRecord

    if len(names) < 2:
        return "".join(names)
    newest = max(names, key=lambda name: (source.written(name), "/" not in name, _step(name)))
    run, ranks = PrivacyRecord.from_json(source.path(newest).read_bytes()), {}
    for name in names:
        with contextlib.suppress(LedgerError):
            record = PrivacyRecord.from_json(source.path(name).read_bytes())
            if record.ledger.promise == run.ledger.promise:
                ranks[name] = (record.report.steps, "/" not in name)
    return max(ranks, key=lambda name: ranks[name])


def _step(name: str) -> int:
    found = _CHECKPOINT.fullmatch(name)
    return int(found[1]) if found else 0
