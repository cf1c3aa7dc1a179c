"""`hf-dp report`: what a run, or a published model, says of its privacy."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_dp.cli.common import AsJson, print_json, refusals


def report(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A folder of DPTrainer, a checkpoint, or a repository OWNER/NAME.")
    ],
    as_json: AsJson = False,
) -> None:
    """What was promised, what was spent, and on what: read from privacy.json.

    Example:

        hf-dp report out/classify

    In an output folder the newest speaks, the model or a checkpoint of a run
    that was interrupted. The claim is printed as it stands; `hf-dp verify`
    checks it.

    Exit codes: 0, read; 2, there is no report, or it cannot be read.
    """
    from hf_dp.errors import shortened
    from hf_dp.hub import RECORD_FILE, open_source
    from hf_dp.hub.card import in_words

    with refusals():
        source = open_source(directory)
        found = [name for name in source.names if name == RECORD_FILE or _is_of_a_checkpoint(name)]
        newest = max(found, key=lambda name: (source.written(name), name == RECORD_FILE, _step(name)), default="")
        place = f"{directory}/{newest.rpartition('/')[0]}" if "/" in newest else directory
        older = place != directory and RECORD_FILE in source.names
        if place != directory:
            source = open_source(place)
        record = source.record()
    if as_json:
        print_json({"source": place, "report": record.report.to_dict(), "ledger": record.ledger.to_dict()})
        return
    console = Console(soft_wrap=True)
    besides = f", the newest here; {directory} holds an older model" if older else ""
    console.print(f"{shortened(place)}{shortened(besides)}\n", markup=False, highlight=False)
    console.print(str(record.report), markup=False, highlight=False)
    table = Table(title="Everything that was released of the training data", title_justify="left")
    for column in ("release", "times", "mechanism"):
        table.add_column(column)
    for event, count, label in record.ledger.entries:
        table.add_row(label, str(count), in_words(event))
    Console().print("\n", table)


def _is_of_a_checkpoint(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return file == "privacy.json" and "/" not in folder and folder.rpartition("-")[2].isdigit()


def _step(name: str) -> int:
    return int(name.partition("/")[0].rpartition("-")[2]) if "/" in name else 0
