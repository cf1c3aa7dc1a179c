"""Time and peak memory of a private step as ratios to an ordinary one, measured in one run.

    python scripts/benchmark.py run --output out/benchmark.json --figure out/benchmark.png
    python scripts/benchmark.py run --case untied --opacus --repeats 9
    python scripts/benchmark.py run --dtype bfloat16 --attention flash_attention_2     (on a GPU)
    python scripts/benchmark.py scaling
    python scripts/benchmark.py operations --case bert
    python scripts/benchmark.py forms
    python scripts/benchmark.py passes
    python scripts/benchmark.py noise
    python scripts/benchmark.py kinds
    python scripts/benchmark.py units
    python scripts/benchmark.py bits --model DIRECTORY
    python scripts/benchmark.py lengths --texts DEVSET.csv --tokenizer DIRECTORY
    python scripts/benchmark.py trainer
    python scripts/benchmark.py startup --model DIRECTORY --texts DEVSET.csv
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

import dataclasses
import json
import math
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmark_loops import lengths, startup, trainer
from benchmark_parts import bits, forms, noise, re_attention
from measuring import (
    Attention,
    Dtype,
    FigurePath,
    Processor,
    begin_peak,
    blank_figure,
    clock_of,
    count,
    measure_memory,
    measure_noise,
    measure_times,
    median_of,
    peak_mib,
    ratio_of,
    save_figure,
    setting_of,
)
from rich.console import Console
from rich.table import Table
from workloads import CASES, VARIANTS, batches, build, predicted

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_IN_PASSES = ["hf_dp", "hf_dp in groups", "hf_dp in two passes"]


def memory(case_name: str, variant: str, dtype: str, attention: str) -> None:
    """Prints the peak memory in MiB of the steps of one variant of one case with its model, in this process."""
    setting = setting_of(dtype, attention)
    case = CASES[case_name]
    import peft
    import transformers.models.auto.modeling_auto  # noqa: F401 - not part of what is measured

    import hf_dp.sampling.poisson
    import hf_dp.step.private_gradient  # noqa: F401 - nor is this

    del peft
    before = peak_mib()
    step = VARIANTS[variant](case, build(case, setting), batches(case, setting.device))
    step()
    # What came before is the check of gradients, which `startup` measures.
    begin_peak()
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    print(torch.cuda.max_memory_allocated() / 2**20 if setting.device.type == "cuda" else peak_mib() - before)


def run(
    case: Annotated[list[str] | None, typer.Option(help="Cases to run; all by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
    opacus: Annotated[bool, typer.Option(help="Beside it Opacus, ghost and hooks.")] = False,
    skip_memory: Annotated[bool, typer.Option(help="Time only.")] = False,
    dtype: Dtype = "float32",
    attention: Attention = "sdpa",
    output: Annotated[Path | None, typer.Option(help="Where to write JSON.")] = None,
    figure: FigurePath = None,
) -> None:
    """Measures each case and prints ratios to the ordinary step."""
    setting = setting_of(dtype, attention)
    names = ["ordinary", "hf_dp", "hf_dp by user", "hf_dp by user, uneven"] + (
        ["opacus ghost", "opacus hooks"] if opacus else []
    )
    columns = [f"{n} {what}" for n in names[1:] for what in ("time", "memory", "operations")]
    table = Table("case", *columns, "limit", "predicted, H100", "ordinary step")
    results: dict[str, Any] = {}
    for case_name in case or list(CASES):
        seconds = measure_times(CASES[case_name], names, repeats, setting)
        sizes = {n: "-" if skip_memory else measure_memory(case_name, n, dtype, attention) for n in names}
        ordinary = median_of(seconds["ordinary"])
        counted = count(CASES[case_name], names, setting).items()
        counts = {name: c if isinstance(c, str) else c.operations for name, c in counted}
        measured = {"time": seconds, "memory": sizes, "operations": counts}
        ratios = {n: {w: ratio_of(found[n], found["ordinary"]) for w, found in measured.items()} for n in names[1:]}
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


def _draw_ratios(results: dict[str, Any], path: Path) -> None:
    figure, panels = blank_figure(10, 2)
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
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    save_figure(figure, path)


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
    names, setting = ["ordinary", *variant], setting_of("float32", "sdpa")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    peaks = {name: math.nan if skip_memory else measure_memory(case, name, "float32", "sdpa") for name in names}
    clock = time.process_time if setting.device.type == "cpu" else time.perf_counter
    seconds = measure_times(CASES[case], names, repeats, setting, clock)
    print(f"{case}, ordinary: {median_of(seconds['ordinary']):.3f} s, {peaks['ordinary']:.0f} MiB")
    for name in names[1:]:
        ratios = (ratio_of(found[name], found["ordinary"]) for found in (seconds, peaks))
        time_ratio, memory_ratio = (r if isinstance(r, str) else f"{r:.2f}" for r in ratios)  # a text says what failed
        print(f"{case}, {name}: time {time_ratio}, memory {memory_ratio}")


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
        counts = count(CASES[case_name], names, setting_of("float32", "sdpa"))
        base = counts.pop("ordinary")
        for name, found in counts.items():
            if isinstance(found, str) or isinstance(base, str):
                print(f"{case_name}, {name}: {found}")
            else:
                ratios = found.operations / base.operations, found.bytes / base.bytes
                print(f"{case_name}, {name}: operations {ratios[0]:.2f}, bytes {ratios[1]:.2f}")


def scaling(
    repeats: Annotated[int, typer.Option(help="Timed steps of each variant.")] = 5,
    dtype: Dtype = "float32",
    attention: Attention = "sdpa",
) -> None:
    """Time of a step over the micro-batch, the length and the number of examples in the dataset."""
    setting, names = setting_of(dtype, attention), ["ordinary", "hf_dp"]
    base = dataclasses.replace(CASES["tied"], batch=8, length=128)
    sweeps = {
        "B, at T = 128": [dataclasses.replace(base, batch=b) for b in (2, 4, 8, 16)],
        "T, at B = 4": [dataclasses.replace(base, batch=4, length=t) for t in (64, 128, 256, 512)],
        "n": [dataclasses.replace(base, batch=2, dataset_size=n) for n in (10**3, 10**5, 10**7)],
    }
    table = Table("over", "value", *(f"{n} ms" for n in names), "ratio")
    for over, cases in sweeps.items():
        values = [c.dataset_size if over == "n" else c.length if over[0] == "T" else c.batch for c in cases]
        times = [measure_times(c, names, repeats, setting) for c in cases]
        for value, seconds in zip(values, times, strict=True):
            shown = [f"{1000 * median_of(seconds[n]):.0f}" for n in names]
            table.add_row(over, str(value), *shown, f"{ratio_of(seconds['hf_dp'], seconds['ordinary']):.2f}")
    Console().print(table)


def kinds(
    case: Annotated[list[str] | None, typer.Option(help="Cases to run; bert by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.")] = 15,
) -> None:
    """A step with each further clipping rule and source of noise, as a ratio to the usual one; they take turns."""
    _print_beside_usual(case or ["bert"], ["hf_dp automatic", "hf_dp chacha20", "hf_dp grid"], repeats)


def units(
    case: Annotated[list[str] | None, typer.Option(help="Cases to run; bert, tied and llama lora by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed steps of each.")] = 7,
    processor: Processor = False,
) -> None:
    """A step by user, on units of 4 rows, of 1, 3 and 4, and of two micro-batches each, as a ratio to one by example on
    the same rows; they take turns."""
    names = [name for name in VARIANTS if name.startswith("hf_dp by user")]
    _print_beside_usual(case or ["bert", "tied", "llama lora"], names, repeats, clock_of(processor))


def _print_beside_usual(
    cases: list[str], names: list[str], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> None:
    for name in cases:
        seconds = measure_times(CASES[name], ["hf_dp", *names], repeats, setting_of("float32", "sdpa"), clock)
        shown = (f"{other} {ratio_of(seconds[other], seconds['hf_dp']):.3f}" for other in names)
        print(
            f"{name}: a step of hf_dp takes {median_of(seconds['hf_dp']):.3f} s, and of it {', '.join(shown)}",
            flush=True,
        )


KINDS = (
    run, passes, operations, forms, scaling, noise, kinds, units, lengths, bits, re_attention, startup, trainer,
)  # fmt: skip
for kind in KINDS:
    app.command()(kind)
app.command(hidden=True)(memory)

if __name__ == "__main__":
    app()
