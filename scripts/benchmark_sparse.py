"""What sparse gradients of an embedding table save: size of the gradient, time and memory of a private step.

    python scripts/benchmark_sparse.py step
    python scripts/benchmark_sparse.py scaling --figure docs/figures/sparse_scaling.png

The model is a BERT encoder of one layer under a table of V rows; the text is generated, with token frequencies by
Zipf's law. "dense" is DP-SGD with noise on all rows and fused AdamW; "adafest" has DP-AdaFEST at the same budget, and
AdamW beside a lazy optimizer for the rows. A step is one logical batch: clipped sum, ledger, noise, optimizer. Variants
take turns, and the median counts. Peak memory is that of a process of its own for each variant, less what the model's
parameters take; so is the share of it that the state of the optimizer is.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_dp.accounting import Ledger
from hf_dp.config import PrivacyConfig, SparseEmbeddingConfig
from hf_dp.config.asked import ROW_COUNTS, asked
from hf_dp.losses import per_example_losses
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows, with_lazy_rows
from hf_dp.per_example import Tables, preflight, record
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
TABLE = "bert.embeddings.word_embeddings.weight"
VARIANTS = ("dense", "adafest")
STEPS, DATASET = 1000, 100_000
_Batch = Annotated[int, typer.Option(help="Examples in a logical batch.")]
_Length = Annotated[int, typer.Option(help="Tokens of an example.")]
_Width = Annotated[int, typer.Option(help="d, of the table and the encoder.")]


def build(rows: int, width: int) -> nn.Module:
    """A random encoder of one layer."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=rows,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_labels=10,
    )
    return BertForSequenceClassification(config).train()


def text(rows: int, batch: int, length: int) -> dict[str, Tensor]:
    """Ids by Zipf's law: the r-th most frequent has a probability in proportion to 1 / r."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.exp(torch.rand(batch, length, generator=generator) * torch.tensor(float(rows - 1)).log()).long()
    return {"input_ids": ranks, "attention_mask": torch.ones_like(ranks), "labels": ranks[:, 0] % 10}


def make_step(name: str, model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], dict[str, float]]:
    """One private step of a variant; it tells how many coordinates of the table's gradient are not zero."""
    size, entropy = len(batch["labels"]), Entropy(None)
    sparse = SparseEmbeddingConfig(noise_ratio=5.0) if name == "adafest" else None
    config = PrivacyConfig(target_epsilon=8.0, sparse_embeddings=sparse)
    sampler = PoissonBatchSampler.of(DATASET, size, entropy)
    plan = Plan.make(config, sampler, STEPS, entropy, *asked(config, STEPS))
    table = dict(model.named_parameters())[TABLE]
    tables = [TABLE] if sparse is not None else []
    rows, held = None, [p for p in model.parameters() if p is not table or sparse is None]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(held, lr=1e-4, fused=True, weight_decay=0.0)
    if sparse is not None:
        selection = AdaptiveSelection(len(table), plan.noise_multiplier_of(ROW_COUNTS), None, plan.noise)
        rows = TableRows(Tables.of({TABLE: table}), None, selection, sparse.contribution_norm)
        optimizer = with_lazy_rows(optimizer, {TABLE: table}, sparse)
    certificate = preflight(model, per_example_losses, {k: v[:3] for k, v in batch.items()}, tables=tables)
    ledger = Ledger()

    def step() -> dict[str, float]:
        private_gradient(
            model,
            lambda b: record(model, per_example_losses, b, certificate=certificate, tables=tables),
            [batch],
            plan,
            ledger,
            by_rows=rows,
        )
        gradient = table.grad
        assert gradient is not None
        coordinates = gradient._values().numel() if gradient.is_sparse else gradient.numel()
        optimizer.step()
        optimizer.zero_grad()
        return {"coordinates": coordinates}

    return step


def _timed(call: Callable[[], dict[str, float]]) -> tuple[float, dict[str, float]]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def measure(rows: int, width: int, batch: int, length: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median seconds of each variant's step, and the coordinates of the table's gradient; the variants take turns."""
    data = text(rows, batch, length)
    steps = {name: make_step(name, build(rows, width), data) for name in VARIANTS}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    coordinates: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            taken, found = _timed(step)
            if repeat:
                seconds[name].append(taken)
                coordinates[name].append(found["coordinates"])
    return {
        name: {"seconds": statistics.median(seconds[name]), "coordinates": statistics.mean(coordinates[name])}
        for name in steps
    }


def _peak_mib() -> float:
    # Not getrusage: what that reports survives exec.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@app.command(hidden=True)
def memory(name: str, rows: int, width: int, batch: int, length: int) -> None:
    """Prints the peak memory in MiB of two steps of one variant in this process, over that before the model."""
    data = text(rows, batch, length)
    before = _peak_mib()
    model = build(rows, width)
    built = _peak_mib()
    step = make_step(name, model, data)
    step()
    step()
    size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    print(json.dumps({"over the parameters": _peak_mib() - before - size, "model": built - before}))


@app.command()
def step(
    rows: Annotated[int, typer.Option(help="V.")] = 250_000,
    width: _Width = 768,
    batch: _Batch = 64,
    length: _Length = 16,
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
) -> None:
    """Size, time and memory of one private step with dense noise and with DP-AdaFEST."""
    found = measure(rows, width, batch, length, repeats)
    for name in VARIANTS:
        command = [sys.executable, __file__, "memory", name, *map(str, (rows, width, batch, length))]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[name]["peak_mib"] = json.loads(printed.splitlines()[-1])["over the parameters"]
    dense, sparse = (found[name] for name in VARIANTS)
    print(f"V {rows}, d {width}, B {batch}, T {length}, {torch.get_num_threads()} thread(s)")
    print(f"a dense gradient of the table: {rows * width * 4 / 2**20:.0f} MiB")
    for name in VARIANTS:
        one = found[name]
        print(
            f"{name}: {one['seconds']:.3f} s, {one['coordinates']:.0f} coordinates, "
            f"{one['peak_mib']:.0f} MiB over the parameters"
        )
    print(
        f"gradient {dense['coordinates'] / max(1.0, sparse['coordinates']):.0f} x smaller, "
        f"step {dense['seconds'] / sparse['seconds']:.1f} x faster"
    )


@app.command()
def scaling(
    width: _Width = 64,
    batch: _Batch = 64,
    length: _Length = 16,
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
    figure: Annotated[Path | None, typer.Option(help="Where to draw it.")] = None,
) -> None:
    """Time of a step over the number of rows V."""
    found: dict[int, Any] = {}
    for rows in (10_000, 30_000, 100_000, 300_000, 1_000_000):
        found[rows] = measure(rows, width, batch, length, repeats)
        shown = ", ".join(f"{name} {1000 * found[rows][name]['seconds']:.1f} ms" for name in VARIANTS)
        print(f"V {rows}: {shown}, {found[rows]['adafest']['coordinates'] / width:.0f} rows with a gradient")
    if figure is not None:
        _draw(found, figure)


def _draw(found: dict[int, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name in VARIANTS:
        axes.loglog(list(found), [1000 * one[name]["seconds"] for one in found.values()], marker="o", label=name)
    axes.set_xlabel("rows of the table, V")
    axes.set_ylabel("private step, ms")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)


if __name__ == "__main__":
    app()
