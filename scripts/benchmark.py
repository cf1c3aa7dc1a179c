"""Time and peak memory of a private step as ratios to an ordinary one, measured in one run.

    python scripts/benchmark.py run --output out/benchmark.json
    python scripts/benchmark.py run --case tied --repeats 9
    python scripts/benchmark.py run --opacus

A step is one logical batch of four micro-batches of B with fused AdamW; the private one also clips each example, adds
noise and charges the ledger. Variants of a case take turns, and the median of the repeats counts. Peak memory is that
of a process of its own for each variant, less what the process held before the model was built.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

MICRO_BATCHES = 4
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
    """A model and the shape of its micro-batches."""

    family: str
    batch: int
    length: int
    config: dict[str, Any] = field(default_factory=dict)
    lora: bool = False


def _gpt2(vocabulary: int, width: int, layers: int, tied: bool = True) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": width // 64, "n_positions": 1024,
        "tie_word_embeddings": tied,
    }  # fmt: skip


_LLAMA = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
_BERT = {
    "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_labels": 10,
}  # fmt: skip
CASES = {
    "tied": Case("gpt2", 8, 128, _gpt2(16384, 512, 4)),
    "untied": Case("gpt2", 8, 128, _gpt2(16384, 512, 4, tied=False)),
    "tied long": Case("gpt2", 4, 512, _gpt2(16384, 512, 4)),
    "tied short": Case("gpt2", 64, 32, _gpt2(16384, 512, 4)),
    "llama lora": Case("llama", 8, 256, _LLAMA, lora=True),
    "bert": Case("bert", 8, 128, _BERT),
    "large vocabulary": Case("gpt2", 4, 256, _gpt2(151936, 896, 1)),
}


def build(case: Case, device: torch.device) -> nn.Module:
    """A random model in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(case.family, **case.config)
    auto = AutoModelForSequenceClassification if case.family == "bert" else AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    return model.to(device).train()


def batches(case: Case, device: torch.device) -> list[dict[str, Tensor]]:
    """One logical batch."""
    made = []
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(0, case.config["vocab_size"], (case.batch, case.length), device=device)
        labels = torch.randint(0, 10, (case.batch,), device=device) if case.family == "bert" else ids
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW over what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def ordinary(model: nn.Module, data: list[dict[str, Tensor]]) -> Callable[[], None]:
    """Forward, backward and AdamW over all micro-batches."""
    optimizer = optimizer_of(model)

    def step() -> None:
        for batch in data:
            (model(**batch).loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def private(model: nn.Module, data: list[dict[str, Tensor]]) -> Callable[[], None]:
    """The library's own step, noise and ledger included."""
    from hf_dp import PrivacyConfig
    from hf_dp.accounting import Ledger
    from hf_dp.losses import per_example_losses
    from hf_dp.per_example import preflight, record
    from hf_dp.plan import Plan
    from hf_dp.randomness import Entropy
    from hf_dp.sampling import PoissonBatchSampler
    from hf_dp.step import private_gradient

    size, entropy, ledger = MICRO_BATCHES * len(data[0]["input_ids"]), Entropy(None), Ledger()
    sampler = PoissonBatchSampler(1000 * size, size, entropy)
    plan = Plan.make(PrivacyConfig(noise_multiplier=1.0), sampler, 10**6, entropy)
    optimizer = optimizer_of(model)
    few = {name: value[:3, :17] if value.dim() > 1 else value[:3] for name, value in data[0].items()}
    certificate = preflight(model, per_example_losses, few)

    def step() -> None:
        private_gradient(
            model, lambda b: record(model, per_example_losses, b, certificate=certificate), data, plan, ledger
        )
        optimizer.step()
        optimizer.zero_grad()

    return step


def _opacus(mode: str) -> Callable[[nn.Module, list[dict[str, Tensor]]], Callable[[], None]]:
    def make(model: nn.Module, data: list[dict[str, Tensor]]) -> Callable[[], None]:
        from opacus import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

        from hf_dp.losses import per_example_losses

        config = {
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "expected_batch_size": len(data) * len(data[0]["labels"]),
        }
        if mode == "hooks":
            wrapped: Any = GradSampleModule(model)
            optimizer: Any = DPOptimizer(optimizer_of(model), **config)
        else:
            wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
            optimizer = DPOptimizerFastGradientClipping(optimizer_of(model), **config)

        def step() -> None:
            for i, batch in enumerate(data):
                last = i == len(data) - 1
                ids = batch["input_ids"]
                positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
                losses = per_example_losses(wrapped, {**batch, "position_ids": positions})
                optimizer.signal_skip_step(do_skip=not last)
                if mode == "hooks":
                    losses.sum().backward()
                else:
                    losses.mean().backward(retain_graph=True)
                    optimizer.zero_grad(True)
                    coefficients = wrapped.get_clipping_coef()
                    wrapped.disable_hooks()
                    (coefficients * losses).sum().backward()
                    wrapped.enable_hooks()
                optimizer.step()
                optimizer.zero_grad()

        return step

    return make


VARIANTS: dict[str, Callable[[nn.Module, list[dict[str, Tensor]]], Callable[[], None]]] = {
    "ordinary": ordinary,
    "hf_dp": private,
    "opacus ghost": _opacus("ghost"),
    "opacus hooks": _opacus("hooks"),
}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_times(case: Case, names: list[str], repeats: int, device: torch.device) -> dict[str, float | str]:
    """The median seconds of each variant's step; the variants take turns."""
    steps: dict[str, Callable[[], None]] = {}
    failed: dict[str, float | str] = {}
    for name in names:
        try:
            steps[name] = VARIANTS[name](build(case, device), batches(case, device))
            steps[name]()
        except Exception as error:  # noqa: BLE001 - a peer that cannot run a case is a result
            steps.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {**{name: statistics.median(values) for name, values in seconds.items()}, **failed}


def _peak_mib() -> float:
    # Not getrusage: what that reports survives exec, so a child begins with its parent's peak.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@app.command(hidden=True)
def memory(case_name: str, variant: str) -> None:
    """Prints the peak memory in MiB of one variant of one case, in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = CASES[case_name]
    import peft
    import transformers.models.auto.modeling_auto  # noqa: F401 - not part of what is measured

    del peft
    before = _peak_mib()
    step = VARIANTS[variant](build(case, device), batches(case, device))
    for _ in range(3):
        step()
    print(torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else _peak_mib() - before)


def measure_memory(case_name: str, variant: str) -> float | str:
    """Peak MiB in a process of its own."""
    command = [sys.executable, __file__, "memory", case_name, variant]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else "failed"


@app.command()
def run(
    case: Annotated[list[str] | None, typer.Option(help="Cases to run; all by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
    opacus: Annotated[bool, typer.Option(help="Beside it Opacus, ghost and hooks.")] = False,
    skip_memory: Annotated[bool, typer.Option(help="Time only.")] = False,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
) -> None:
    """Measures each case and prints ratios to the ordinary step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ["ordinary", "hf_dp"] + (["opacus ghost", "opacus hooks"] if opacus else [])
    table = Table("case", *[f"{n} {what}" for n in names[1:] for what in ("time", "memory")], "ordinary step")
    results: dict[str, Any] = {}
    for case_name in case or list(CASES):
        times = measure_times(CASES[case_name], names, repeats, device)
        sizes = {n: "-" if skip_memory else measure_memory(case_name, n) for n in names}
        results[case_name] = {"case": asdict(CASES[case_name]), "seconds": times, "peak_mib": sizes}
        cells = [
            str(v) if isinstance(v, str) or isinstance(base, str) else f"{v / base:.2f}"
            for n in names[1:]
            for v, base in ((times[n], times["ordinary"]), (sizes[n], sizes["ordinary"]))
        ]
        table.add_row(case_name, *cells, f"{times['ordinary']:.3f} s")
    Console().print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": platform.processor()}
        output.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
