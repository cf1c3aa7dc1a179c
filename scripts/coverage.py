"""What is exact and what is refused: architectures with their heads, PEFT methods, precision and settings, as tables.

    python scripts/coverage.py
    python scripts/coverage.py --only gpt2 --only DoRA
    python scripts/coverage.py --write
    python scripts/coverage.py --write --only gpt2

Every case is a tiny random model. `record` is held against a loop over single examples in float64 and float32, with as
many examples as positions, with as many examples as head dimensions, with one example, and with one example replaced,
which must not move the gradients of the others. "Exact" shows the largest relative error in float64; anything that is
neither exact nor refused makes the script fail. `--write` puts the tables into docs/coverage.md and a summary into
README.md; with `--only` the other rows stay as they are.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, preflight, record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.coverage_tables import between_marks, markdown, merged, read, summary
from scripts.judging import (
    TOLERANCE,
    USUAL,
    Build,
    Shapes,
    error,
    judge,
    judge_low_precision,
    ordinary,
    relative,
    worst,
)
from tests import architectures, low_bits, zoo

ROOT = Path(__file__).resolve().parents[1]
# Patches, and patches with a class token; the positions of a soft prompt, and these with the text's.
SHAPES = {
    "image": ((3, 7), (9, 7), (10, 7), (6, 7), (1, 7)),
    "prompt": (*USUAL, (5, 7), (12, 7)),
    "image_text": (*USUAL, (4, 7), (5, 7)),
}
ARCHITECTURES, PEFT, SETTINGS = "Architectures", "PEFT", "Precision and settings"
QUANTISED = "LoRA over a base in few bits"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def judge_head(name: str, head: str, shapes: Shapes | None = None) -> str:
    """One architecture with one head; "-" where Transformers has no such head."""
    shapes = shapes or SHAPES.get(head, USUAL)
    try:
        return judge(functools.partial(zoo.tiny, name, head), zoo.batches_of(name, head), zoo.loss_of(head), shapes)
    except ValueError as reason:
        if "Unrecognized configuration class" in str(reason):
            return "-"
        raise


def judge_adapter(method: str, shapes: Shapes | None = None, **changes: Any) -> str:
    """One PEFT method; `changes` are those of its base's config."""
    head = zoo.adapter_head(method)
    if zoo.has_bf16_base(method):
        model = zoo.adapted(method, torch.float32)
        return judge_low_precision(model, model, zoo.text_batch(head, 5, 16))
    if shapes is None:
        shapes = SHAPES["prompt"] if hasattr(zoo.adapted(method), "prompt_encoder") else USUAL
    build = functools.partial(zoo.adapted, method, **changes)
    return judge(build, functools.partial(zoo.text_batch, head), shapes=shapes)


def judge_quantised(kind: str, device: str = "cpu") -> str:
    """One way to hold a frozen base in few bits, before and after an evaluation, in float32; "-" without its package.

    Against a loop over single examples, and against one over whole weights that are what these bits stand for: where a
    frozen layer passes a gradient on wrongly, a loop over it is as wrong.
    """
    if not low_bits.is_there(kind):
        return "-"
    batch = {name: value.to(device) for name, value in language(5, 16, torch.float32).items()}
    model, largest = low_bits.adapted(low_bits.base(kind, device)).to(device), 0.0
    try:
        certificate = preflight(model, per_example_losses, batch)
    except HfDpError as refusal:
        return f"refused: {refusal.found}"
    for _ in range(2):
        found = record(model, per_example_losses, batch, certificate=certificate)
        for truth in (model, low_bits.whole(model)):
            largest = worst((largest, error(found, loop(truth, per_example_losses, batch))))
        low_bits.evaluated(model, batch)
    return f"exact {largest:.0e} in float32" if largest <= TOLERANCE[torch.float32] else f"WRONG by {largest:.1g}"


MODELS: dict[str, Build] = {
    "gpt2": functools.partial(zoo.tiny, "gpt2", "causal_lm"),
    "llama": functools.partial(zoo.tiny, "llama", "causal_lm"),
    "llama with LoRA": functools.partial(zoo.adapted, "LoRA"),
}


def language(size: int = 5, length: int = 16, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return zoo.text_batch("causal_lm", size, length, dtype)


def autocast_bf16(build: Build, shapes: Shapes) -> str:
    """Against the same weights in float32."""
    return judge_low_precision(build(torch.float32), build(torch.float32), language(), autocast=True)


def weights_bf16(build: Build, shapes: Shapes) -> str:
    """Against the rounded weights in float32."""
    return judge_low_precision(build(torch.bfloat16), build(torch.bfloat16).float(), language())


def checkpointed(build: Build, reentrant: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With gradient checkpointing; where the embedding is frozen, as PEFT wants it."""
    model: Any = build(dtype)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if any(not p.requires_grad for p in model.parameters()):
        model.enable_input_require_grads()
    return model


def checkpointing(reentrant: bool, build: Build, shapes: Shapes) -> str:
    """As without: a loop over a model whose checkpoints cut off its gradient would agree with anything."""
    whole = ordinary(build(torch.float64), per_example_losses, language())
    off = relative(ordinary(checkpointed(build, reentrant), per_example_losses, language()), whole)
    if not off <= TOLERANCE[torch.float64]:
        return f"WRONG by {off:.1g}: the loop itself is"
    return judge(functools.partial(checkpointed, build, reentrant), language, shapes=shapes)


def dropout(reentrant: bool | None, build: Build, shapes: Shapes) -> str:
    """Under one seed: sums are those of an ordinary backward pass, norms those of each example's own sum."""
    model = zoo.with_dropout(build(torch.float64) if reentrant is None else checkpointed(build, reentrant))
    batch, size = language(), 5
    plain = per_example_losses(model.eval(), batch)
    model.train()
    torch.manual_seed(5)
    found = record(model, per_example_losses, batch)
    torch.manual_seed(5)
    off = relative(found.weighted_sum(torch.ones(size)), ordinary(model, per_example_losses, batch))
    each = [found.weighted_sum(torch.eye(size, dtype=torch.float64)[i]) for i in range(size)]
    norms = torch.stack([sum(v.square().sum() for v in one.values()) for one in each])
    off = worst((off, float((norms / found.squared_norms() - 1).abs().max())))
    if torch.allclose(plain, found.losses, rtol=1e-6):
        return "WRONG: nothing was dropped"
    return f"exact {off:.0e}" if off <= TOLERANCE[torch.float64] else f"WRONG by {off:.1g}"


def label_smoothing(build: Build, shapes: Shapes) -> str:
    """As `TrainingArguments.label_smoothing_factor`."""
    return judge(build, language, functools.partial(per_example_losses, label_smoothing=0.1), shapes)


def own_loss(build: Build, shapes: Shapes) -> str:
    """What `compute_per_example_loss` may return."""
    return judge(build, language, zoo.margin_losses, shapes)


SETTING: dict[str, Callable[[Build, Shapes], str]] = {
    "bf16 autocast": autocast_bf16,
    "bf16 weights": weights_bf16,
    "gradient checkpointing, reentrant": functools.partial(checkpointing, True),
    "gradient checkpointing, not reentrant": functools.partial(checkpointing, False),
    "dropout": functools.partial(dropout, None),
    "dropout, checkpointing, reentrant": functools.partial(dropout, True),
    "dropout, checkpointing, not reentrant": functools.partial(dropout, False),
    "label smoothing": label_smoothing,
    "a loss of one's own": own_loss,
}


def judge_all(only: list[str] | None = None) -> dict[str, dict[str, dict[str, str]]]:
    """{table: {row: {column: result}}}, of all rows or of those in `only`."""

    def chosen(rows: Mapping[str, Any]) -> list[str]:
        return [name for name in rows if not only or name in only]

    return {
        ARCHITECTURES: {
            name: {head: judge_head(name, head) for head in architectures.HEADS[name]}
            for name in chosen(architectures.CONFIGS)
        },
        PEFT: {method: {zoo.adapter_head(method): judge_adapter(method)} for method in chosen(zoo.ADAPTERS)},
        SETTINGS: {
            name: {model: SETTING[name](build, USUAL) for model, build in MODELS.items()} for name in chosen(SETTING)
        },
        QUANTISED: {name: {"llama": judge_quantised(name)} for name in chosen(low_bits.KINDS)},
    }


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="Rows; all by default.")] = None,
    write: Annotated[bool, typer.Option(help="Put them into docs/coverage.md and README.md.")] = False,
) -> None:
    """Judges every case."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    readme, page = ROOT / "README.md", ROOT / "docs/coverage.md"
    try:
        kept = read(page.read_text(encoding="utf-8")) if write and only else {}
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"rows can only be written beside those that are there: {error}") from error
    results = judge_all(only)
    lacking = {low_bits.KINDS[kind][0] for kind in results.get(QUANTISED, ()) if not low_bits.is_there(kind)}
    if write and lacking:
        raise typer.BadParameter(f"rows would get lost; install {' and '.join(sorted(lacking))}")
    if write:
        whole = merged(kept, results)
        readme.write_text(between_marks(readme.read_text(encoding="utf-8"), summary(whole)), encoding="utf-8")
        page.write_text(markdown(whole), encoding="utf-8")
    cells = [
        (title, name, column, result)
        for title, rows in results.items()
        for name, row in rows.items()
        for column, result in row.items()
    ]
    table = Table("part", "row", "column", "result")
    for cell in cells:
        table.add_row(*cell)
    Console(width=160).print(table)
    if any(result.startswith("WRONG") for *_, result in cells):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
