"""How benchmarks measure: seconds of variants that take turns, operations, and peak memory in a process of its own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from workloads import VARIANTS, Case, Counting, Setting, batches, build

# The command, which memory is measured in processes of.
BENCHMARK = Path(__file__).with_name("benchmark.py")
FigurePath = Annotated[Path | None, typer.Option(help="Where to draw it.")]
Dtype = Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")]
Attention = Annotated[str, typer.Option(help="As attn_implementation.")]
Processor = Annotated[bool, typer.Option(help="Seconds of the processor, for one thread on a machine with other work.")]


def setting_of(dtype: str, attention: str) -> Setting:
    return Setting(torch.device("cuda" if torch.cuda.is_available() else "cpu"), getattr(torch, dtype), attention)


def clock_of(processor: bool) -> Callable[[], float]:
    return time.process_time if processor else time.perf_counter


def settled(device: torch.device) -> None:
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
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
    return {**in_turns(steps, repeats, setting.device, clock), **failed}


def in_turns(
    calls: dict[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each, which take turns, in one order and in the other."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for name in list(calls)[:: -1 if repeat % 2 else 1]:
            seconds[name].append(timed(calls[name], device, clock))
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
    return statistics.median(timed(lambda: source.add_(sums, 1.0, 0), setting.device) for _ in range(repeats + 1))


def timed(call: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    settled(device)
    start = clock()
    call()
    settled(device)
    return clock() - start


def peak_mib() -> float:
    # Not getrusage: what that reports survives exec, so a child begins with its parent's peak.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def begin_peak() -> float:
    """What is held now, in MiB; `peak_mib` counts from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_mib()


def measure_memory(case_name: str, variant: str, *setting: str) -> float | str:
    """Peak MiB of a variant of a case in a process of its own."""
    return measured_alone("memory", case_name, variant, *setting)


def measured_alone(*asked: str) -> float | str:
    """The last number that the command prints, so asked in a process of its own."""
    command = [sys.executable, str(BENCHMARK), *asked]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else "failed"


def ratio_of(value: Any, base: Any) -> float | str:
    if isinstance(value, list) and isinstance(base, list):
        return statistics.median(a / b for a, b in zip(value, base, strict=True))
    return value if isinstance(value, str) else base if isinstance(base, str) else value / base


def median_of(values: Any) -> Any:
    return statistics.median(values) if isinstance(values, list) else values


def blank_figure(width: float, panels: int) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, panels, figsize=(width, 3.2), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
