"""Which architectures and heads are exact, and which are refused, as a table.

    python scripts/coverage.py
    python scripts/coverage.py --markdown --write README.md

Every case is a tiny random model. `record` is held against a loop over single examples in float64 and float32, with as
many examples as positions, with as many examples as head dimensions, with one example, and with one example replaced,
which must not move the gradients of the others. "Exact" shows the largest relative error in float64; anything that is
neither exact nor refused makes the script fail.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from hf_dp.errors import HfDpError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import PerExampleGradients, loop, preflight, record

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import zoo

MARKS = ("<!-- coverage begins: python scripts/coverage.py --write README.md -->", "<!-- coverage ends -->")
_DECODER, _ENCODER = ("causal_lm", "sequence", "token", "qa"), ("masked_lm", "sequence", "token", "qa")
HEADS = {
    **dict.fromkeys(zoo.CONFIGS, _DECODER),
    **dict.fromkeys(
        ("bert", "roberta", "distilbert", "xlm-roberta", "albert", "electra", "deberta-v2", "modernbert", "mpnet"),
        _ENCODER,
    ),
    "t5": ("seq2seq",),
    "bart": ("seq2seq",),
    "vit": ("image",),
}
SHAPES = ((3, 7), (7, 7), (6, 7), (1, 7))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def error(found: PerExampleGradients, truth: PerExampleGradients) -> float:
    """The largest relative error of norms and weighted sums."""
    weights = torch.linspace(0.5, 1.5, found.batch_size, dtype=torch.float64)
    ours, theirs = found.weighted_sum(weights), truth.weighted_sum(weights)
    whole = float(sum(v.double().square().sum() for v in theirs.values())) ** 0.5
    sums = max(float((ours[n].double() - theirs[n].double()).norm()) / whole for n in theirs)
    norms, true_norms = found.squared_norms().double().sqrt(), truth.squared_norms().double().sqrt()
    return max(sums, float(((norms - true_norms).abs() / true_norms).max()))


def moved_by_a_neighbour(model: nn.Module, batch: dict[str, Any]) -> float:
    """How far replacing the last example by the first moves the gradients of the others, relative."""
    other = {k: torch.cat([v[:-1], v[:1]]) for k, v in batch.items()}
    weights = torch.ones(len(batch["labels"] if "labels" in batch else batch["start_positions"]), dtype=torch.float64)
    weights[-1] = 0
    one, two = (record(model, per_example_losses, b).weighted_sum(weights) for b in (batch, other))
    whole = float(sum(v.square().sum() for v in one.values())) ** 0.5
    return float(sum((one[n] - two[n]).square().sum() for n in one)) ** 0.5 / whole


def judge(name: str, head: str) -> str:
    """ "exact 3e-16", "refused: why", "-" where there is no such head, or "WRONG"."""
    worst = 0.0
    for dtype in (torch.float64, torch.float32):
        try:
            model = zoo.tiny(name, head, dtype)
        except ValueError as reason:
            if "Unrecognized configuration class" in str(reason):
                return "-"
            raise
        for size, length in SHAPES:
            batch = zoo.text_batch(head, size, length, dtype)
            try:
                if size == 3:
                    preflight(model, per_example_losses, batch)
                found = record(model, per_example_losses, batch)
            except HfDpError as refusal:
                return f"refused: {refusal.found}"
            off = error(found, loop(model, per_example_losses, batch))
            if dtype == torch.float64:
                worst = max(worst, off, moved_by_a_neighbour(model, batch) if size > 1 else 0.0)
            if not off <= TOLERANCE[dtype]:
                return f"WRONG by {off:.1g} ({size} x {length}, {dtype})"
    return f"exact {worst:.0e}" if worst <= TOLERANCE[torch.float64] else f"WRONG by {worst:.1g}"


def markdown(results: dict[str, dict[str, str]]) -> str:
    """The table for the README, and a list of the refusals."""
    heads = sorted(
        {head for row in results.values() for head in row}, key=(*_DECODER, "masked_lm", "seq2seq", "image").index
    )
    lines = ["| architecture | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name, row in results.items():
        cells = [row.get(head, "-").split(":")[0] for head in heads]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    reasons = [
        f"- {name}: {next(text for text in row.values() if text.startswith('refused'))[9:]}"
        for name, row in results.items()
        if any(text.startswith("refused") for text in row.values())
    ]
    return "\n".join(
        [*lines, "", "Refused with all parameters trainable (freeze the named one, or use LoRA):", "", *reasons]
    )


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Architectures; all by default.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    write: Annotated[Path | None, typer.Option(help="Put the Markdown between the marks in this file.")] = None,
) -> None:
    """Judges every architecture with every head."""
    warnings.simplefilter("ignore")
    results = {name: {head: judge(name, head) for head in HEADS[name]} for name in only or zoo.CONFIGS}
    text = markdown(results)
    if write is not None:
        old = write.read_text(encoding="utf-8")
        pattern = re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1])
        write.write_text(
            re.sub(pattern, f"{MARKS[0]}\n\n{text}\n\n{MARKS[1]}".replace("\\", r"\\"), old, flags=re.S),
            encoding="utf-8",
        )
    if as_markdown:
        print(text)
    else:
        table = Table("architecture", "head", "result")
        for name, row in results.items():
            for head, result in row.items():
                table.add_row(name, head, result)
        Console(width=160).print(table)
    if any(result.startswith("WRONG") for row in results.values() for result in row.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
