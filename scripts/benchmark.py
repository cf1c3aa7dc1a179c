"""Time and peak memory of a private step as ratios to an ordinary one, measured in one run.

    python scripts/benchmark.py run --output out/benchmark.json --figure out/benchmark.png
    python scripts/benchmark.py run --case untied --opacus --repeats 9
    python scripts/benchmark.py run --dtype bfloat16 --attention flash_attention_2     (on a GPU)
    python scripts/benchmark.py scaling --figure docs/figures/scaling.png
    python scripts/benchmark.py operations --case bert
    python scripts/benchmark.py forms
    python scripts/benchmark.py passes
    python scripts/benchmark.py noise
    python scripts/benchmark.py kinds
    python scripts/benchmark.py units
    python scripts/benchmark.py bits --model DIRECTORY
    python scripts/benchmark.py lengths --texts DEVSET.csv --tokenizer DIRECTORY
    python scripts/benchmark.py trainer
    python scripts/benchmark.py re-attention

A step is one logical batch of four micro-batches of B with fused AdamW; the private one also clips each example, adds
noise and charges the ledger. Variants of a case take turns, and the median of the repeats counts; of a ratio of times,
the median of those of steps that ran one after the other: a machine that slows down slows both. Peak memory is that
of a process of its own for each variant, less what the process held before the model was built. Operations are those of
matrix products and attention, counted; the limit is their ratio and the time of the noise, measured alone: what a
private step would take if it did these operations as fast as an ordinary one, and nothing else. What an H100 would take
is predicted from products and bytes (hf_dp/planning/speed.py).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from workloads import CASES, VARIANTS, Case, Counting, Setting, batches, build, predicted

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_Figure = Annotated[Path | None, typer.Option(help="Where to draw it.")]
_Dtype = Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")]
_IN_PASSES = ["hf_dp", "hf_dp in groups", "hf_dp in two passes"]
_Attention = Annotated[str, typer.Option(help="As attn_implementation.")]


def _setting(dtype: str, attention: str) -> Setting:
    return Setting(torch.device("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, dtype), attention)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_times(
    case: Case, names: list[str], repeats: int, setting: Setting, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """The seconds of each variant's steps; the variants take turns."""
    steps: dict[str, Callable[[], object]] = {}
    failed: dict[str, Any] = {}
    for name in names:
        try:
            steps[name] = VARIANTS[name](case, build(case, setting), batches(case, setting.device))
            steps[name]()
        except Exception as error:  # noqa: BLE001 - a peer that cannot run a case is a result
            steps.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return {**_in_turns(steps, repeats, setting.device, clock), **failed}


def _in_turns(
    calls: dict[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each, which take turns, in one order and in the other."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in list(calls)[:: -1 if repeat % 2 else 1]:
            seconds[name].append(_timed(calls[name], device, clock))
    return seconds


def count(case: Case, names: list[str], setting: Setting) -> dict[str, Counting | str]:
    """What one step of each variant computes, and moves."""
    counts: dict[str, Counting | str] = {}
    for name in names:
        try:
            step = VARIANTS[name](case, build(case, setting), batches(case, setting.device))
            step()
            with Counting() as counting:
                step()
            counts[name] = counting
        except Exception as error:  # noqa: BLE001 - as above
            counts[name] = type(error).__name__
    return counts


def measure_noise(case: Case, setting: Setting, repeats: int) -> float:
    """Seconds of the noise of one step."""
    from hf_dp.noise.gaussian import GaussianNoise
    from hf_dp.randomness import Entropy

    trained = [p for p in build(case, setting).parameters() if p.requires_grad]
    sums, source = [torch.zeros_like(p, dtype=torch.float32) for p in trained], GaussianNoise(Entropy(None))
    return statistics.median(_timed(lambda: source.add_(sums, 1.0, 0), setting.device) for _ in range(repeats + 1))


def _timed(call: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    _synchronize(device)
    start = clock()
    call()
    _synchronize(device)
    return clock() - start


def _peak_mib() -> float:
    # Not getrusage: what that reports survives exec, so a child begins with its parent's peak.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@app.command(hidden=True)
def memory(case_name: str, variant: str, dtype: str, attention: str) -> None:
    """Prints the peak memory in MiB of one variant of one case, in this process."""
    setting = _setting(dtype, attention)
    case = CASES[case_name]
    import peft
    import transformers.models.auto.modeling_auto  # noqa: F401 - not part of what is measured

    import hf_dp.sampling.poisson
    import hf_dp.step.private_gradient  # noqa: F401 - nor is this

    del peft
    before = _peak_mib()
    step = VARIANTS[variant](case, build(case, setting), batches(case, setting.device))
    for _ in range(3):
        step()
    print(torch.cuda.max_memory_allocated() / 2**20 if setting.device.type == "cuda" else _peak_mib() - before)


def measure_memory(case_name: str, variant: str, *setting: str) -> float | str:
    """Peak MiB in a process of its own."""
    command = [sys.executable, __file__, "memory", case_name, variant, *setting]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else "failed"


def _ratio(value: Any, base: Any) -> float | str:
    if isinstance(value, list) and isinstance(base, list):
        return statistics.median(a / b for a, b in zip(value, base, strict=True))
    return value if isinstance(value, str) else base if isinstance(base, str) else value / base


def _median(values: Any) -> Any:
    return statistics.median(values) if isinstance(values, list) else values


@app.command()
def run(
    case: Annotated[list[str] | None, typer.Option(help="Cases to run; all by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
    opacus: Annotated[bool, typer.Option(help="Beside it Opacus, ghost and hooks.")] = False,
    skip_memory: Annotated[bool, typer.Option(help="Time only.")] = False,
    dtype: _Dtype = "float32",
    attention: _Attention = "sdpa",
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
    figure: _Figure = None,
) -> None:
    """Measures each case and prints ratios to the ordinary step."""
    setting = _setting(dtype, attention)
    names = ["ordinary", "hf_dp", "hf_dp by user", "hf_dp by user, uneven"] + (
        ["opacus ghost", "opacus hooks"] if opacus else []
    )
    columns = [f"{n} {what}" for n in names[1:] for what in ("time", "memory", "operations")]
    table = Table("case", *columns, "limit", "predicted, H100", "ordinary step")
    results: dict[str, Any] = {}
    for case_name in case or list(CASES):
        seconds = measure_times(CASES[case_name], names, repeats, setting)
        sizes = {n: "-" if skip_memory else measure_memory(case_name, n, dtype, attention) for n in names}
        ordinary = _median(seconds["ordinary"])
        counted = count(CASES[case_name], names, setting).items()
        counts = {name: c if isinstance(c, str) else c.operations for name, c in counted}
        measured = {"time": seconds, "memory": sizes, "operations": counts}
        ratios = {n: {w: _ratio(found[n], found["ordinary"]) for w, found in measured.items()} for n in names[1:]}
        limit = ratios["hf_dp"]["operations"] + measure_noise(CASES[case_name], setting, repeats) / ordinary
        results[case_name] = {
            "case": dataclasses.asdict(CASES[case_name]), "seconds": seconds, "peak_mib": sizes, "operations": counts,
            "ratios": ratios, "limit": limit, "predicted_h100": predicted(CASES[case_name], setting.dtype),
        }  # fmt: skip
        cells = [v if isinstance(v, str) else f"{v:.2f}" for n in names[1:] for v in ratios[n].values()]
        on_gpu = results[case_name]["predicted_h100"]
        table.add_row(case_name, *cells, f"{limit:.2f}", f"{on_gpu:.2f}", f"{ordinary:.3f} s")
    Console(width=140).print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        packages = {name: version(name) for name in ("torch", "transformers", "peft")}
        machine = {"threads": torch.get_num_threads(), "cpu": platform.processor(), "device": str(setting.device)}
        shown = {"machine": machine, "versions": packages, "dtype": dtype, "attention": attention, "results": results}
        output.write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
    if figure is not None:
        _draw_ratios(results, figure)


def _axes(width: float, panels: int) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, panels, figsize=(width, 3.2), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_ratios(results: dict[str, Any], path: Path) -> None:
    figure, panels = _axes(10, 2)
    for axes, what in zip(panels, ("time", "memory"), strict=True):
        names = list(next(iter(results.values()))["ratios"])
        for offset, name in enumerate(names):
            values = [r["ratios"][name][what] for r in results.values()]
            heights = [v if isinstance(v, float) else 0.0 for v in values]
            axes.barh(
                [i - 0.8 * offset / len(names) for i in range(len(values))], heights, 0.7 / len(names), label=name
            )
        axes.set_yticks(range(len(results)), results if what == "time" else [""] * len(results))
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel(f"{what}, ratio to an ordinary step")
    panels[0].legend(loc="lower left")
    _save(figure, path)


@app.command()
def passes(
    case: Annotated[str, typer.Option(help="What is measured.")] = "llama, checkpointing",
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
    variant: Annotated[list[str], typer.Option(help="Beside the ordinary step.")] = _IN_PASSES,
    skip_memory: Annotated[bool, typer.Option(help="Time only.")] = False,
) -> None:
    """Time and memory of a step in one pass, clipped flat and by groups (a layer each), and in two, as ratios to the
    ordinary step.

    On a CPU the time is the processor's, and large blocks of memory go back when they are freed: what glibc's heap
    keeps between them is another number for each order of the same blocks.
    """
    names, setting = ["ordinary", *variant], _setting("float32", "sdpa")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    peaks = {name: math.nan if skip_memory else measure_memory(case, name, "float32", "sdpa") for name in names}
    clock = time.process_time if setting.device.type == "cpu" else time.perf_counter
    seconds = measure_times(CASES[case], names, repeats, setting, clock)
    print(f"{case}, ordinary: {_median(seconds['ordinary']):.3f} s, {peaks['ordinary']:.0f} MiB")
    for name in names[1:]:
        time_ratio, memory_ratio = (_ratio(found[name], found["ordinary"]) for found in (seconds, peaks))
        print(f"{case}, {name}: time {time_ratio:.2f}, memory {memory_ratio:.2f}")


@app.command()
def operations(
    case: Annotated[list[str] | None, typer.Option(help="Cases to count; all by default.")] = None,
    opacus: Annotated[bool, typer.Option(help="Beside it Opacus, ghost and hooks.")] = False,
) -> None:
    """Counts operations, and bytes read and written, as ratios to the ordinary step; nothing is timed. By user: rows of
    units with 4 each, or with 1, 3 and 4."""
    names = ["ordinary", "hf_dp", "hf_dp by user", "hf_dp by user, uneven"] + (
        ["opacus ghost", "opacus hooks"] if opacus else []
    )
    for case_name in case or list(CASES):
        counts = count(CASES[case_name], names, _setting("float32", "sdpa"))
        base = counts.pop("ordinary")
        for name, found in counts.items():
            if isinstance(found, str) or isinstance(base, str):
                print(f"{case_name}, {name}: {found}")
            else:
                ratios = found.operations / base.operations, found.bytes / base.bytes
                print(f"{case_name}, {name}: operations {ratios[0]:.2f}, bytes {ratios[1]:.2f}")


@app.command()
def forms(
    batch: Annotated[int, typer.Option(help="Examples.")] = 8,
    length: Annotated[int, typer.Option(help="Positions of each example.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed calls.")] = 31,
) -> None:
    """Norms and weighted sum of one weight's gradients: from Gram matrices, or from instantiated gradients kept."""
    from hf_dp.per_example.factors import Factors, Outer, squared_norms
    from hf_dp.per_example.gram import Dense

    def step(form: Callable[[], Factors], total: torch.Tensor, coefficients: torch.Tensor) -> None:
        use = form()
        squared_norms([use])
        use.add_weighted_(total, coefficients)

    device = _setting("float32", "sdpa").device
    for left, right in ((512, 512), (512, 1536), (512, 2048)):
        sides = (Dense(torch.randn(batch, length, size, device=device)) for size in (left, right))
        outer, total = Outer(*sides), torch.zeros(left, right, device=device)
        coefficients, seconds = torch.rand(batch, device=device), {"Gram": [0.0], "instantiated": [0.0]}
        for _ in range(repeats):
            for name, form in (("Gram", lambda use=outer: use), ("instantiated", outer.instantiated)):
                seconds[name].append(_timed(functools.partial(step, form, total, coefficients), device))
        shown = ", ".join(f"{name} {1000 * statistics.median(values[1:]):.1f} ms" for name, values in seconds.items())
        print(f"{left} x {right}, B {batch}, T {length}: {shown}")


@app.command()
def scaling(
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
    figure: _Figure = None,
    dtype: _Dtype = "float32",
    attention: _Attention = "sdpa",
) -> None:
    """Time of a step over the micro-batch, the length and the number of examples in the dataset."""
    setting, names = _setting(dtype, attention), ["ordinary", "hf_dp"]
    base = dataclasses.replace(CASES["tied"], batch=8, length=128)
    sweeps = {
        "B, at T = 128": [dataclasses.replace(base, batch=b) for b in (2, 4, 8, 16)],
        "T, at B = 4": [dataclasses.replace(base, batch=4, length=t) for t in (64, 128, 256, 512)],
        "n": [dataclasses.replace(base, batch=2, dataset_size=n) for n in (10**3, 10**5, 10**7)],
    }
    drawing, panels = _axes(11, len(sweeps)) if figure else (None, [None] * len(sweeps))
    table = Table("over", "value", *(f"{n} ms" for n in names), "ratio")
    for axes, (over, cases) in zip(panels, sweeps.items(), strict=True):
        values = [c.dataset_size if over == "n" else c.length if over[0] == "T" else c.batch for c in cases]
        times = [measure_times(c, names, repeats, setting) for c in cases]
        for value, seconds in zip(values, times, strict=True):
            shown = [f"{1000 * _median(seconds[n]):.0f}" for n in names]
            table.add_row(over, str(value), *shown, f"{_ratio(seconds['hf_dp'], seconds['ordinary']):.2f}")
        if axes is not None:
            for name in names:
                axes.plot(values, [_median(seconds[name]) for seconds in times], marker="o", label=name)
            axes.set(xlabel=over, ylim=(0, None), xscale="log" if over == "n" else "linear")
    Console().print(table)
    if drawing is not None and figure is not None:
        panels[0].set_ylabel("seconds a step")
        panels[0].legend()
        _save(drawing, figure)


@app.command()
def noise(
    size: Annotated[int, typer.Option(help="Numbers.")] = 2 * 10**7,
    repeats: Annotated[int, typer.Option(help="Timed calls.")] = 9,
) -> None:
    """Numbers a second of torch.randn and of each source of noise, added to a sum; ratios to gaussian. In turns."""
    from hf_dp.accounting import GaussianNoise
    from hf_dp.noise.table import SOURCES, source_of
    from hf_dp.randomness import Entropy

    device = _setting("float32", "sdpa").device
    total, plain = torch.zeros(size, device=device), torch.empty(size, device=device)
    calls: dict[str, Callable[[], object]] = {"torch, drawn": plain.normal_}
    for kind in SOURCES:
        source = source_of(GaussianNoise(multiplier=1.0, kind=kind), Entropy(None))
        calls[f"{kind}, drawn, scaled and added"] = functools.partial(source.add_, [total], 1.0, 0)
    seconds = _in_turns(calls, repeats, device)
    usual = seconds["gaussian, drawn, scaled and added"]
    for name, times in seconds.items():
        took, ratio = _median(times), _ratio(times, usual)
        print(f"{name}: {size / took / 1e6:.0f} million a second, {1e9 * took / size:.1f} ns a number, {ratio:.2f}")


@app.command()
def kinds(
    case: Annotated[list[str] | None, typer.Option(help="Cases to run; bert by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.")] = 15,
) -> None:
    """A step with each further clipping rule and source of noise, as a ratio to the usual one; they take turns."""
    _print_beside_usual(case or ["bert"], ["hf_dp automatic", "hf_dp chacha20", "hf_dp grid"], repeats)


@app.command()
def units(
    case: Annotated[list[str] | None, typer.Option(help="Cases to run; bert, tied and llama lora by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.")] = 7,
    processor: Annotated[
        bool, typer.Option(help="Seconds of the processor, for one thread on a machine with other work.")
    ] = False,
) -> None:
    """A step by user, on units of 4 rows, of 1, 3 and 4, and of two micro-batches each, as a ratio to one by example on
    the same rows; they take turns."""
    names = [name for name in VARIANTS if name.startswith("hf_dp by user")]
    clock = time.process_time if processor else time.perf_counter
    _print_beside_usual(case or ["bert", "tied", "llama lora"], names, repeats, clock)


def _print_beside_usual(
    cases: list[str], names: list[str], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> None:
    for name in cases:
        seconds = measure_times(CASES[name], ["hf_dp", *names], repeats, _setting("float32", "sdpa"), clock)
        shown = (f"{other} {_ratio(seconds[other], seconds['hf_dp']):.3f}" for other in names)
        print(
            f"{name}: a step of hf_dp takes {_median(seconds['hf_dp']):.3f} s, and of it {', '.join(shown)}", flush=True
        )


def _rows_of_lengths(texts: Path | None, tokenizer: str | None, rows: int) -> list[dict[str, list[int]]]:
    """Random tokens: as many as whole rows of a CSV file have, or from 16 to 512, each as likely."""
    draw, vocabulary = random.Random(0), CASES["llama lora"].config["vocab_size"]
    if texts is None:
        counts = [draw.randint(16, 512) for _ in range(rows)]
    else:
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(tokenizer)
        with texts.open(encoding="utf-8", newline="") as file:
            lines = [" || ".join(row.values()) for row in csv.DictReader(file)]
        counts = [len(encode(line)["input_ids"]) for line in draw.sample(lines, rows)]
    return [{"input_ids": [draw.randrange(vocabulary) for _ in range(count)]} for count in counts]


def _cut(rows: list[dict[str, list[int]]], cut: str, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a logical batch; `cut` is "8 rows", or "2048 tokens" of any number of rows."""
    from hf_dp.data.collate import LogicalBatchCollator

    def pad(few: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in few)
        made = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        for name, filler in made.items():
            kept = ([1] * len(row["input_ids"]) if name == "attention_mask" else row["input_ids"] for row in few)
            made[name] = torch.tensor([ids + [filler] * (longest - len(ids)) for ids in kept], device=device)
        return made

    number, what = cut.split()
    size, cap = (int(number), None) if what == "rows" else (len(rows), int(number))
    found: list[dict[str, torch.Tensor]] = LogicalBatchCollator(size, pad, max_tokens=cap)(rows)["micro_batches"]
    return found


@app.command()
def lengths(
    texts: Annotated[Path | None, typer.Option(help="CSV, a row an example; without it 16 to 512 tokens.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Of the texts.")] = None,
    rows: Annotated[int, typer.Option(help="In the logical batch.")] = 64,
    cut: Annotated[list[str] | None, typer.Option(help="How it is cut, the first for comparison.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.")] = 3,
    alone: Annotated[bool, typer.Option(hidden=True, help="Only the peak memory of the first, in MiB.")] = False,
) -> None:
    """A private step on rows of mixed lengths, cut by rows and by tokens: ratios of time and memory, in turns."""
    setting, case, data = _setting("float32", "sdpa"), CASES["llama lora"], _rows_of_lengths(texts, tokenizer, rows)
    cuts = cut or ["8 rows", "1024 tokens", "2048 tokens", "4096 tokens"]
    import peft
    import transformers.models.auto.modeling_auto  # noqa: F401 - not part of what is measured

    del peft
    before = _peak_mib()
    made = {name: _cut(data, name, setting.device) for name in (cuts[:1] if alone else cuts)}
    steps = {name: VARIANTS["hf_dp"](case, build(case, setting), parts) for name, parts in made.items()}
    for step in steps.values():
        step()
    if alone:
        print(torch.cuda.max_memory_allocated() / 2**20 if setting.device.type == "cuda" else _peak_mib() - before)
        return
    seconds = _in_turns(steps, repeats, setting.device)
    asked = [*(["--texts", str(texts), "--tokenizer", str(tokenizer)] if texts else []), "--rows", str(rows), "--alone"]
    table = Table("cut", "micro-batches", "tokens with padding", "time", "memory", "seconds", "MiB")
    peaks = {}
    for name, parts in made.items():
        command = [sys.executable, __file__, "lengths", *asked, "--cut", name]
        peaks[name] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        padded = sum(batch["input_ids"].numel() for batch in parts)
        ratios = _ratio(seconds[name], seconds[cuts[0]]), peaks[name] / peaks[cuts[0]]
        table.add_row(
            name, str(len(parts)), str(padded), *(f"{ratio:.2f}" for ratio in ratios),
            f"{_median(seconds[name]):.2f}", f"{peaks[name]:.0f}",
        )  # fmt: skip
    counts = [len(row["input_ids"]) for row in data]
    print(f"{rows} rows of {min(counts)} to {max(counts)} tokens, {sum(counts)} in all, median {_median(counts):.0f}")
    Console(width=120).print(table)


BITS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {},
    "bitsandbytes nf4": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32",
    },
    "bitsandbytes int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "torchao int8": {"quant_type": "Int8WeightOnlyConfig"},
}  # fmt: skip


def _in_bits(model: str, kind: str) -> Any:
    """A causal language model with LoRA on all linear layers, its base in so many bits."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    options: dict[str, Any] = {"dtype": torch.bfloat16 if kind == "bfloat16" else torch.float32}
    if kind.startswith("bitsandbytes"):
        options["quantization_config"] = BitsAndBytesConfig(**BITS[kind])
    elif kind.startswith("torchao"):
        import torchao.quantization

        options["quantization_config"] = TorchAoConfig(getattr(torchao.quantization, BITS[kind]["quant_type"])())
    base = AutoModelForCausalLM.from_pretrained(model, device_map="cpu", **options)
    return get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).train()


def _bytes(value: torch.Tensor) -> int:
    """Of a parameter: also of the tensors that a quantised one is made of, and of the scales beside it."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    beside = [getattr(value, name, None) for name in ("quant_state", "SCB")]
    scales = [getattr(one, "absmax", one) for one in beside if one is not None]
    return int(value.nbytes) + sum(int(scale.nbytes) for scale in scales)


@app.command()
def bits(model: Annotated[str, typer.Option(help="Of a causal language model.")]) -> None:
    """MiB of the weights of a model with LoRA over a frozen base in fewer bits; nothing is timed."""
    sizes = {name: sum(map(_bytes, _in_bits(model, name).parameters())) / 2**20 for name in BITS}
    for name, size in sizes.items():
        print(f"{name}: {size:.0f} MiB, {size / sizes['float32']:.2f}")


@app.command()
def re_attention(
    repeats: Annotated[int, typer.Option(help="Timed forward passes.")] = 9,
    length: Annotated[int, typer.Option(help="Positions of each example.")] = 512,
    dtype: _Dtype = "float32",
) -> None:
    """Time of a forward pass with Re-Attention as a ratio to plain sdpa, both fidelities."""
    from hf_dp import ReAttentionConfig
    from hf_dp.parts.re_attention import ReAttention
    from hf_dp.parts.re_attention.deviations import one_step, relative_counts

    setting = _setting(dtype, "sdpa")
    for name in ("tied long", "llama lora"):
        case = dataclasses.replace(CASES[name], batch=4, length=length, lora=False)
        ids = batches(case, setting.device)[0]["input_ids"]
        models = {fidelity: build(case, setting).eval() for fidelity in ("plain", "isotropic", "per_feature")}
        for fidelity in ("isotropic", "per_feature"):
            config = ReAttentionConfig(fidelity=fidelity, token_frequencies="uniform")  # type: ignore[arg-type]
            attention = ReAttention(models[fidelity], config)
            shares = torch.linspace(0.01, 1, case.config["vocab_size"])
            attention.errors = one_step(relative_counts(models[fidelity], 64.0, shares), 1e-3)
        seconds: dict[str, list[float]] = {fidelity: [] for fidelity in models}
        with torch.no_grad():
            for _ in range(repeats + 1):
                for fidelity, model in models.items():
                    seconds[fidelity].append(_timed(functools.partial(model, ids), setting.device))
        plain, *others = (values[1:] for values in seconds.values())
        ratios = ", ".join(f"{f} {_ratio(t, plain):.2f}" for f, t in zip(list(models)[1:], others, strict=True))
        print(f"{case.family}, B 4, T {length}: plain {1000 * _median(plain):.0f} ms, {ratios} times that")


class _Virtual(torch.utils.data.Dataset):
    """As many examples as wanted, made when they are asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([index % 97, index % 89, index % 83, index % 79])
        return {"input_ids": ids, "labels": ids}


@app.command()
def trainer(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    size: Annotated[int, typer.Option(help="Examples in the dataset.")] = 10**7,
    logging_steps: Annotated[int, typer.Option(help="As in TrainingArguments.")] = 500,
) -> None:
    """What a step of DPTrainer takes beyond the engine: sampling, ledger, logging, Trainer's own loop."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, default_data_collator

    import hf_dp.training.run as module
    from hf_dp import DPTrainer, PrivacyConfig

    inside: list[float] = []
    engine = module.private_gradient

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = engine(*args, **kwargs)
        inside.append(time.perf_counter() - start)
        return result

    config = GPT2Config(vocab_size=100, n_positions=8, n_embd=32, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    with tempfile.TemporaryDirectory() as folder:
        private = DPTrainer(
            GPT2LMHeadModel(config),
            TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                logging_steps=logging_steps,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=_Virtual(size),
            data_collator=default_data_collator,
            privacy=PrivacyConfig(noise_multiplier=1.0),
        )
        starts: list[float] = []
        step = private.training_step
        private.training_step = lambda *args: starts.append(time.perf_counter()) or step(*args)  # type: ignore[method-assign]
        module.private_gradient = timed  # type: ignore[assignment]
        private.train()
        module.private_gradient = engine
    whole = (starts[-1] - starts[10]) / (len(starts) - 11)
    engine_alone = sum(inside[10:-1]) / len(inside[10:-1])
    print(f"a step: {1000 * whole:.2f} ms, of it the engine {1000 * engine_alone:.2f} ms, everything else "
          f"{1000 * (whole - engine_alone):.2f} ms (n = {size}, optimizer and data collation included)")  # fmt: skip


if __name__ == "__main__":
    app()
