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
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.losses import check_own_loss, per_example_losses
from hf_dp.per_example import Certificate, PerExampleGradients, loop, preflight, record
from hf_dp.per_example.batch import LossFunction, batch_size
from hf_dp.per_example.precision import computed_in
from hf_dp.per_example.switches import switch_off

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests import architectures, low_bits, zoo

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python scripts/coverage.py --write"
MARKS = (f"<!-- coverage begins: {COMMAND} -->", "<!-- coverage ends -->")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3}
# Of norms in bf16, against a loop in float32.
LOW_PRECISION = 0.01
_SHAPES = ((3, 7), (7, 7), (6, 7), (1, 7))
# Patches, and patches with a class token; the positions of a soft prompt, and these with the text's.
SHAPES = {
    "image": ((3, 7), (9, 7), (10, 7), (6, 7), (1, 7)),
    "prompt": (*_SHAPES, (5, 7), (12, 7)),
    "image_text": (*_SHAPES, (4, 7), (5, 7)),
}
ARCHITECTURES, PEFT, SETTINGS = "Architectures", "PEFT", "Precision and settings"
QUANTISED = "LoRA over a base in few bits"
Results = Mapping[str, Mapping[str, Mapping[str, str]]]
Build = Callable[[torch.dtype], nn.Module]
Shapes = tuple[tuple[int, int], ...]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# --- one case -------------------------------------------------------------------------------------------------------


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN where any is: what max() drops."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def relative(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference in one parameter, relative to the whole gradient."""
    whole = float(sum(v.double().square().sum() for v in theirs.values())) ** 0.5
    return worst(float((ours[n].double() - theirs[n].double()).norm()) / whole for n in theirs)


def norm_error(found: PerExampleGradients, truth: PerExampleGradients) -> float:
    """The largest relative error of a norm, but for gradients that are nothing beside the others, rounding apart."""
    squares, true = found.squared_norms(), truth.squared_norms()
    is_rounding = (squares - true).abs() <= 100 * torch.finfo(squares.dtype).eps * true.sum()
    norms, true_norms = squares.double().sqrt(), true.double().sqrt()
    is_nothing = is_rounding & (true_norms <= 1e-2 * true_norms.max())
    return float(((norms - true_norms).abs() / true_norms).where(~is_nothing, 0).max())


def error(found: PerExampleGradients, truth: PerExampleGradients) -> float:
    """The largest relative error of norms and weighted sums."""
    weights = torch.linspace(0.5, 1.5, found.batch_size, dtype=torch.float64, device=found.losses.device)
    return worst((relative(found.weighted_sum(weights), truth.weighted_sum(weights)), norm_error(found, truth)))


def moved_by_a_neighbour(
    model: nn.Module, loss_fn: LossFunction, batch: dict[str, Any], certificate: Certificate
) -> float:
    """How far replacing the last example by the first moves the gradients of the others, relative."""
    weights = torch.ones(batch_size(batch), dtype=torch.float64)
    weights[-1] = 0
    other = {k: torch.cat([v[:-1], v[:1]]) for k, v in batch.items()}
    one, two = (record(model, loss_fn, b, certificate=certificate).weighted_sum(weights) for b in (batch, other))
    return relative(two, one)


def judge(
    build: Build,
    make_batch: Callable[[int, int, torch.dtype], dict[str, Any]],
    loss_fn: LossFunction = per_example_losses,
    shapes: Shapes = _SHAPES,
) -> str:
    """ "exact 3e-16", "refused: why" or "WRONG"; in float64 with and without a certificate, in float32 with one, in two
    of several shapes.

    A batch of one example is read by the certificate, as in training: it has no size to tell its axis by.
    """
    largest, model, doubles = 0.0, build(torch.float64), [make_batch(*shape, torch.float64) for shape in shapes]
    try:
        certificate = preflight(model, loss_fn, doubles[0])
        if loss_fn is per_example_losses:
            check_own_loss(model, doubles[0])
        for batch in doubles:
            known = certificate if batch_size(batch) == 1 else None
            off = error(record(model, loss_fn, batch, certificate=known), loop(model, loss_fn, batch))
            if not off <= TOLERANCE[torch.float64]:
                # Some families compute parts in float32 whatever they are in.
                with computed_in(model, batch, torch.float64):
                    off = error(record(model, loss_fn, batch, certificate=known), loop(model, loss_fn, batch))
            if batch_size(batch) > 1:
                off = worst((off, moved_by_a_neighbour(model, loss_fn, batch, certificate)))
            if not off <= TOLERANCE[torch.float64]:
                return f"WRONG by {off:.1g} with {batch_size(batch)} examples"
            largest = max(largest, off)
        model = build(torch.float32)
        switch_off(model)
        for batch in (make_batch(*shape, torch.float32) for shape in shapes[1:3]):
            off = error(record(model, loss_fn, batch, certificate=certificate), loop(model, loss_fn, batch))
            if not off <= TOLERANCE[torch.float32]:
                return f"WRONG by {off:.1g} with {batch_size(batch)} examples in float32"
    except HfDpError as refusal:
        return f"refused: {refusal.found}"
    return f"exact {largest:.0e}"


def judge_low_precision(
    model: nn.Module,
    oracle: nn.Module,
    batch: dict[str, Any],
    autocast: bool = False,
    tolerance: float = LOW_PRECISION,
) -> str:
    """ "within 0.3 %" of the norms by a loop, sums being those of an ordinary backward pass over the same batch."""
    device = next(iter(batch.values())).device

    def losses(model: Any, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return per_example_losses(model, batch)

    try:
        found = record(model, losses, batch, certificate=preflight(model, losses, batch))
    except HfDpError as refusal:
        return f"refused: {refusal.found}"
    sums = found.weighted_sum(torch.ones(batch_size(batch), device=device))
    if any(total.dtype != torch.float32 for total in sums.values()):
        return "WRONG: sums are not in float32"
    norms, off = (
        norm_error(found, loop(oracle, per_example_losses, batch)),
        relative(sums, ordinary(model, losses, batch)),
    )
    if not worst((norms, off)) <= tolerance:
        return f"WRONG by {norms:.1g} in norms, {off:.1g} in sums"
    return f"within {100 * norms:.1f} %"


def ordinary(model: nn.Module, loss_fn: LossFunction, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of an ordinary backward pass from the sum of the losses."""
    loss_fn(model, batch).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    named = {name: gradients[name] for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return named


# --- the three tables -----------------------------------------------------------------------------------------------


def judge_head(name: str, head: str, shapes: Shapes | None = None) -> str:
    """One architecture with one head; "-" where Transformers has no such head."""
    try:
        zoo.tiny(name, head)
    except ValueError as reason:
        if "Unrecognized configuration class" in str(reason):
            return "-"
        raise
    return judge(
        functools.partial(zoo.tiny, name, head),
        zoo.batches_of(name, head),
        zoo.loss_of(head),
        shapes or SHAPES.get(head, _SHAPES),
    )


def judge_adapter(method: str, shapes: Shapes | None = None) -> str:
    """One PEFT method."""
    head = zoo.adapter_head(method)
    if zoo.has_bf16_base(method):
        model = zoo.adapted(method, torch.float32)
        return judge_low_precision(model, model, zoo.text_batch(head, 5, 16))
    has_prompt = hasattr(zoo.adapted(method), "prompt_encoder")
    return judge(
        functools.partial(zoo.adapted, method),
        functools.partial(zoo.text_batch, head),
        shapes=shapes or (SHAPES["prompt"] if has_prompt else _SHAPES),
    )


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
            name: {model: SETTING[name](build, _SHAPES) for model, build in MODELS.items()} for name in chosen(SETTING)
        },
        QUANTISED: {name: {"llama": judge_quantised(name)} for name in chosen(low_bits.KINDS)},
    }


# --- how it is written down -----------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """The whole page: a table for each part, and below it why something is refused."""
    optional = dict.fromkeys(name for name, _ in low_bits.KINDS.values() if find_spec(name))
    versions = ", ".join([_versions(), *(f"{name} {version(name)}" for name in optional)])
    about = (
        f'Written by `{COMMAND}` ({versions}), which explains how each case is judged. "exact" is followed by the '
        'largest relative error of norms and sums in float64 against a loop over single examples, "within" by that of '
        "bf16 norms against a loop in float32. What is refused is refused by name before anything is released; its "
        "reasons are below each table. \"Experts batched\" is `model.set_experts_implementation('batched_mm')`."
    )
    lines = ["# Coverage", "", *textwrap.wrap(about, 120, break_on_hyphens=False)]
    for title, rows in results.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines += ["", f"## {title}", "", f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        for name, row in rows.items():
            cells = [row.get(column, "-").split(":")[0] for column in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += _reasons(rows)
    return "\n".join(lines) + "\n"


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))


def read(page: str) -> dict[str, dict[str, dict[str, str]]]:
    """The results that `markdown` made a page of.

    Raises:
        ValueError: they were found with other versions, so that rows of both would not be comparable.
    """
    if _versions() not in page.replace("\n", " "):
        raise ValueError(f"docs/coverage.md was not written with {_versions()}; write all rows")
    results: dict[str, dict[str, dict[str, str]]] = {}
    for section in page.split("\n## ")[1:]:
        title, header, _, *lines = [line for line in section.splitlines() if line]
        columns, rows = _cells(header), results.setdefault(title, {})
        for name, *cells in (_cells(line) for line in lines if line.startswith("|")):
            rows[name] = {c: text for c, text in zip(columns[1:], cells, strict=True) if text != "-"}
            for line in lines:
                if line.startswith(f"- {name} ("):
                    where, _, reason = line.removeprefix(f"- {name} (").partition("): ")
                    rows[name] |= {column: f"{rows[name][column]}: {reason}" for column in where.split(", ")}
    return results


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def merged(old: Results, new: Results) -> dict[str, dict[str, Mapping[str, str]]]:
    """`old` with the rows of `new` in place of theirs, or after them."""
    return {title: {**old.get(title, {}), **rows} for title, rows in new.items()}


def _reasons(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    lines = []
    for name, row in rows.items():
        columns: dict[str, list[str]] = {}
        for column, text in row.items():
            if ":" in text:
                columns.setdefault(_shortened(text.partition(": ")[2]), []).append(column)
        lines += [f"- {name} ({', '.join(where)}): {reason}" for reason, where in columns.items()]
    return ["", *lines] if lines else []


def _shortened(reason: str) -> str:
    """The first of several parameters stands for all."""
    return re.sub(r"(\w+\.[\w.]+)(, \w+\.[\w.]+)+", r"\1 and others", reason)


def summary(results: Results) -> str:
    """The README's table: one row for each part, and what in it is exact and what is refused."""
    lines = ["| | exact | refused by name |", "| --- | --- | --- |"]
    for title, rows in results.items():
        exact, refused = [], []
        for name, row in rows.items():
            left_out = [column for column, text in row.items() if text.startswith(("refused", "WRONG"))]
            known = [column for column, text in row.items() if text != "-"]
            if len(left_out) < len(known):
                exact.append(name)
            if left_out:
                refused.append(name if left_out == known else f"{name} ({', '.join(left_out)})")
        lines.append(f"| {title} | {'; '.join(exact) or '-'} | {'; '.join(refused) or '-'} |")
    lines += [
        "",
        "Each head with the largest error found, and why something is refused: [docs/coverage.md](docs/coverage.md).",
    ]
    return "\n".join(lines)


def between_marks(text: str, new: str) -> str:
    """`text` with `new` where the coverage marks are.

    Raises:
        ValueError: it has no marks.
    """
    pattern = r"<!-- coverage begins.*?-->.*?" + re.escape(MARKS[1])
    if not re.search(pattern, text, flags=re.S):
        raise ValueError(f"no {MARKS[0]} ... {MARKS[1]} to write between")
    return re.sub(pattern, lambda _: f"{MARKS[0]}\n\n{new}\n\n{MARKS[1]}", text, flags=re.S)


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
