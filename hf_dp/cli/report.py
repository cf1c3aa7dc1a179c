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

    In the output folder of a run that was interrupted, the newest checkpoint
    speaks. The claim is printed as it stands; `hf-dp verify` checks it.

    Exit codes: 0, read; 2, there is no report, or it cannot be read.
    """
    from hf_dp.errors import shortened
    from hf_dp.hub import RECORD_FILE, open_source
    from hf_dp.hub.card import in_words

    with refusals():
        source = open_source(directory)
        place = directory
        if RECORD_FILE not in source.names:
            saved = [n.split("/")[0] for n in source.names if n.endswith(f"/{RECORD_FILE}") and n.count("/") == 1]
            numbered = [name for name in saved if name.rpartition("-")[2].isdigit()]
            if numbered:
                place = f"{directory}/{max(numbered, key=lambda name: int(name.rpartition('-')[2]))}"
                source = open_source(place)
        record = source.record()
    if as_json:
        print_json({"source": place, "report": record.report.to_dict(), "ledger": record.ledger.to_dict()})
        return
    console = Console(soft_wrap=True)
    console.print(f"{shortened(place)}\n", markup=False, highlight=False)
    console.print(str(record.report), markup=False, highlight=False)
    table = Table(title="Everything that was released of the training data", title_justify="left")
    for column in ("release", "times", "mechanism"):
        table.add_column(column)
    for event, count, label in record.ledger.entries:
        table.add_row(label, str(count), in_words(event))
    Console().print("\n", table)
