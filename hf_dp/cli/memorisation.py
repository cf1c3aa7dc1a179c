"""`hf-dp memorisation`: what given models give away of given texts, one model beside the other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_dp.cli.common import AsJson, TextColumn, in_json, print_json, refusals, texts_of
from hf_dp.errors import ConfigurationError
from hf_dp.figures import at_most, percent

if TYPE_CHECKING:
    from hf_dp.audit.members import Found, Membership
    from hf_dp.audit.memorisation import Written
    from hf_dp.cli.memorised import Measured

_READ_AS = (
    "What was found is there; what was not found may still be: no attack proves privacy, and the claim is epsilon. "
    "Texts that were in and texts that were not must be of one kind: an attack also tells kinds apart, and then finds "
    "what is no membership. These numbers are exact functions of private texts: epsilon does not cover publishing them."
)


def memorisation(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Folders of causal language models, adapters included.")
    ],
    members: Annotated[Path, typer.Option(help="Texts that were trained on: CSV, TSV, JSON, JSON lines or parquet.")],
    others: Annotated[Path, typer.Option(help="Texts of the same kind that were not.")],
    reference: Annotated[
        str | None, typer.Option(help="The folder of a model that saw neither, such as the one before training.")
    ] = None,
    secrets: Annotated[
        Path | None,
        typer.Option(help="Random secrets that were trained on, in columns prefix (what stood before) and secret."),
    ] = None,
    text_column: TextColumn = "text",
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a text that are read.")] = 256,
    confidence: Annotated[float, typer.Option(help="Of each interval.")] = 0.95,
    output: Annotated[
        Path | None, typer.Option(help="A folder for memorisation.json and memorisation.png.", file_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Attack given models as an outsider would, and report what they give away.

    Membership by loss, and by how much the loss is below a reference
    model's: AUC, and how many members are found where hardly any other text
    is taken for one. Second halves of texts that a model writes to the letter
    from the first. The exposure of secrets, in bits.

    Example, an ordinary model beside a private one:

        hf-dp memorisation out/ordinary out/private --members train.csv --others test.csv

    Texts must be as the training saw them, and --others of the same kind as
    --members. A true positive rate at 0.1% needs 1,000 others. That nothing
    is found proves nothing: what is proven is epsilon.

    Exit codes: 0, measured, whatever was found; 2, refused.
    """
    # torch and transformers take seconds to import; the other commands should not wait for them.
    with refusals():
        from hf_dp.audit.given import check_confidence
        from hf_dp.audit.secrets import Secret
        from hf_dp.cli.memorised import measured
        from hf_dp.data.files import check_columns, rows_of_file
        from hf_dp.demo.quiet import quiet

        check_confidence(confidence)
        if len(set(models)) < len(models):
            raise ConfigurationError(
                "a model that is named twice.", why="each has one row in the report.", fix="name it once."
            )
        inside, outside = texts_of(members, text_column), texts_of(others, text_column)
        known = set(inside)
        kept = [text for text in outside if text not in known]
        if outside and not kept:
            raise ConfigurationError(
                f"no text of {others} that is not in {members} too.",
                why="what was in the training is told from texts of the same kind that were not.",
                fix="give such texts with --others.",
            )
        given = []
        if secrets is not None:
            rows = rows_of_file(secrets)
            check_columns(
                str(secrets), rows, ("prefix", "secret"), fix="call the two columns of secrets prefix and secret."
            )
            given = [Secret(row["prefix"], row["secret"]) for row in rows]
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        with quiet():
            found = measured(models, reference, inside, kept, given, longest=max_length, confidence=confidence)
        values = {
            "members": len(inside), "others": len(kept), "others_left_out": len(outside) - len(kept),
            "confidence": confidence, "max_length": max_length, **found.to_dict(),
        }  # fmt: skip
        if output is not None:
            from hf_dp.cli.memorisation_figure import draw

            (output / "memorisation.json").write_text(in_json(values) + "\n", encoding="utf-8")
            draw(found, output / "memorisation.png")
    if as_json:
        print_json(values)
        return
    _print(found, len(outside) - len(kept), confidence)
    if output is not None:
        Console().print(f"memorisation.json and memorisation.png are in {output}", soft_wrap=True, markup=False)


def _print(found: Measured, left_out: int, confidence: float) -> None:
    from hf_dp.audit.memorisation import DRAWS
    from hf_dp.hub import RECORD_FILE

    console, first = Console(), next(iter(found.models.values())).by_loss
    table = Table(
        title=f"Membership: {first.members:,} texts that were in, {first.others:,} that were not; intervals at "
        f"{percent(confidence)}",
        title_justify="left",
    )
    table.add_column("model")
    table.add_column("attack")
    table.add_column("AUC", justify="right")
    for rate in first.at:
        table.add_column(f"found at\n{percent(rate)} wrong", justify="right")
    for name, one in found.models.items():
        attacks = {"loss": one.by_loss, "loss, less reference": one.by_reference}
        for attack, told in attacks.items():
            if told is not None:
                table.add_row(found.names[name], attack, *_told(told))
        claim = found.claims[name]
        if claim is not None and claim.rates:
            most = [at_most(claim.rates[rate], 1) for rate in first.at]
            table.add_row(found.names[name], f"{claim.said}: at most", "", *most)
        elif claim is not None and not claim.private:
            table.add_row(found.names[name], f"{RECORD_FILE}: {claim.said}")
        table.add_section()
    if found.reference is not None:
        table.add_row("reference", "loss (control)", *_told(found.reference))
    console.print(table)
    if left_out:
        console.print(f"{left_out} texts of --others are in --members too, and were left out.")
    for name, one in found.models.items():
        if one.cut:
            console.print(f"{found.names[name]} read {one.cut} texts in part (--max-length).")
    if found.reference is not None and not found.reference.by_chance:
        console.print(
            "[bold]The reference saw neither, and tells them apart:[/bold] members and others are not of one kind, or "
            "it did see some."
        )
    table = Table(title="Second halves written to the letter, from the first half", title_justify="left")
    for column in ("model", "of those in", "of those not in", f"in,\n{DRAWS} draws", f"not in,\n{DRAWS} draws"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, one in found.models.items():
        table.add_row(
            found.names[name],
            _written(one.members),
            _written(one.others),
            f"{one.members.drawn:.2%}",
            f"{one.others.drawn:.2%}",
        )
    console.print(table)
    _print_secrets(found, console)
    console.print(_READ_AS)


def _print_secrets(found: Measured, console: Console) -> None:
    exposed = {name: one.secrets for name, one in found.models.items() if one.secrets is not None}
    if not exposed:
        return
    from hf_dp.audit.memorisation import DRAWS
    from hf_dp.audit.secrets import MEAN_EXPOSURE_BY_CHANCE

    least = min(count for one in exposed.values() for count in one.candidates)
    table = Table(
        title="Secrets: how far up among all that they could have been, in bits",
        title_justify="left",
        caption=f"Fully known: {math.log2(least):.1f} or more. Chance: {MEAN_EXPOSURE_BY_CHANCE:.1f} on average.",
    )
    for column in ("model", "exposure,\nmean", "largest", "more than\nchance", "said", f"said in\n{DRAWS} draws"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, secrets in exposed.items():
        said = f"{secrets.written.found}/{secrets.written.of}", f"{secrets.written.drawn:.1%}"
        exposures = f"{secrets.mean:.1f}", f"{max(secrets.exposures):.1f}"
        table.add_row(found.names[name], *exposures, "no" if secrets.by_chance else "yes", *said)
    console.print(table)


def _told(one: Membership) -> list[str]:
    low, high = one.auc_interval
    return [f"{one.auc:.3f}\n{low:.3f} to {high:.3f}", *(_found(rate, at) for rate, at in one.at.items())]


def _found(rate: float, at: Found | None) -> str:
    from hf_dp.audit.members import fewest_others

    if at is None:
        return f"needs {fewest_others(rate):,}\nothers"
    low, high = at.true_positives
    # What is allowed at a rate of wrong ones is no bound on what was found at a larger one.
    return f"{at.true_positive_rate:.1%}\n{low:.1%} to {high:.1%}\nwrong: <={at_most(at.false_positives[1], 2)}"


def _written(one: Written) -> str:
    low, high = one.interval
    return f"{one.found}/{one.of}\n{low:.1%} to {high:.1%}"
