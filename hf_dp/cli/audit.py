"""`hf-dp audit`: a small model is trained with canaries and attacked; what is found stands beside what is claimed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_dp.cli.common import NO, AsJson, TextColumn, print_json, refusals, some, texts_of
from hf_dp.errors import ConfigurationError
from hf_dp.figures import lower, percent, upper

_GAUSSIAN = "All units are in every step: bounds are of a Gaussian mechanism, which is what is claimed then."


def audit(
    output: Annotated[
        Path | None,
        typer.Option(help="A folder for the model, its record with the audit in it, and a figure.", file_okay=False),
    ] = None,
    epsilon: Annotated[float, typer.Option(help="What is promised.")] = 4.0,
    delta: Annotated[float, typer.Option(help="Of the promise, and of what is shown.")] = 1e-5,
    steps: Annotated[int, some(help="Of training.")] = 4,
    sampled: Annotated[
        float, typer.Option(help="The share of all units in a step. At 1 attacks are strongest, and more is shown.")
    ] = 1.0,
    canaries: Annotated[int, some(help="With a parameter of their own.")] = 10_000,
    texts: Annotated[int, some(help="Canaries of random tokens.")] = 400,
    confidence: Annotated[float, typer.Option(help="Of all that is shown, together.")] = 0.95,
    model: Annotated[
        Path | None, typer.Option(help="Adapters (LoRA) on the language model in this folder, instead of a small one.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="With --model: texts to train on, in a column of CSV, TSV, JSON, JSON lines or parquet."),
    ] = None,
    text_column: TextColumn = "text",
    examples: Annotated[int, some(help="Of --data the first so many.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Attack a training by this library as an outsider would, and hold what is found against its claim.

    A small GPT-2 is trained with DP-SGD on messages and on canaries, each in
    the data or not by a coin. Four attacks guess which were in: by a parameter
    of each canary's own, by the same once noise of seeds that stand in the
    saved files is taken off, by loss, and by gradient. What they get right
    shows that epsilon is at least so much. A bound above the claim speaks
    against it, wrongly in at most 5 of 100 honest trainings (--confidence); a
    low one says nothing. Draws, what examples add, and the noise of two further
    trainings are held against what is charged.

    Example, a minute long:

        hf-dp audit --output audited

    With --model and --data the same is done to a pretrained language model
    with LoRA, on texts of your own.

    The audit of a training of your own: docs/audit.md.

    Exit codes: 0, no bound is above the claim, and steps do what is charged; 1,
    otherwise; 2, refused.
    """
    with refusals():
        # torch and transformers take seconds to import; the other commands should not wait for them.
        from hf_dp.audit.outcome import LOW
        from hf_dp.demo.audited import Pretrained, audited

        if (model is None) != (data is None):
            raise ConfigurationError(
                "--model and --data, one without the other.",
                why="a pretrained model is trained on texts of yours; the small one makes its own.",
                fix="give both, or neither.",
            )
        pretrained = None
        if model is not None and data is not None:
            pretrained = Pretrained(model, texts_of(data, text_column)[:examples])
        found = audited(
            output, epsilon=epsilon, delta=delta, steps=steps, sampled=sampled, dirac=canaries, tokens=texts,
            confidence=confidence, pretrained=pretrained,
        )  # fmt: skip
    report, made = found.report, found.audit
    if as_json:
        shown = {"epsilon": made.epsilon, "confidence": made.confidence, "attacks": made.to_dict()}
        seen = [dataclasses.asdict(one) for one in found.seen]
        print_json({"holds": found.holds, "audit": shown, "seen": seen, "report": report.to_dict()})
    else:
        table = Table(
            title=f"What attacks show of epsilon, all with confidence {percent(made.confidence)} together",
            title_justify="left",
            caption=_GAUSSIAN if any(one.mu is not None for one in made.attacks.values()) else None,
        )
        for column in ("attack", "canaries", "guesses", "right", "epsilon at least"):
            table.add_column(column, justify="left" if column == "attack" else "right")
        for name, one in made.attacks.items():
            table.add_row(name, f"{one.canaries}", f"{one.guesses}", f"{one.right}", lower(one.epsilon, 3))
        table.add_section()
        claimed = f"claimed, at delta {delta:g}"
        table.add_row(claimed, f"n {report.dataset_size}", "", "", f"at most {upper(report.epsilon, 3)}")
        console = Console()
        console.print(table)
        if made.epsilon > report.epsilon:
            above = f"A bound is above the claim, which is wrong with confidence {percent(made.confidence)}."
            console.print(f"[bold red]{above}[/bold red]")
        else:
            console.print(f"No bound is above the claim. {LOW}")
        for odd in found.odd:
            console.print(f"[bold red]Steps do otherwise than is charged[/bold red]: {odd.what}: {odd.found}.")
        if found.seen and not found.odd:
            console.print(f"Steps do what is charged, in all of {len(found.seen)} tests of draws, sums and noise.")
        if output is not None:
            console.print(f"Model, record and audit.png are in {output}", soft_wrap=True, markup=False)
    if not found.holds:
        raise typer.Exit(NO)
