"""What scripts/gpu.py tells of costs: how fast the machine is, and the time and memory of a step."""

from __future__ import annotations

import functools
import gc
import operator
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import measuring
import torch
from torch.profiler import ProfilerActivity, profile
from workloads import GPU_CASES, MICRO_BATCHES, SMALL_CASES, VARIANTS, Case, Setting, batches, build, predicted

from hf_dp.per_example import products
from hf_dp.per_example.chosen import Chosen

Cases = Iterator[tuple[str, Callable[[], str]]]
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "dp-accounting", "numpy", "scipy")


def machine(device: torch.device) -> Cases:
    """What it is, and how fast its products and copies are."""
    is_gpu = device.type == "cuda"
    yield "device", lambda: torch.cuda.get_device_name(device) if is_gpu else platform.processor() or "CPU"
    size = 8192 if is_gpu else 256
    for dtype in (torch.bfloat16, torch.float32):
        yield f"{dtype} products".removeprefix("torch."), functools.partial(_products, size, dtype, device)
    yield "copies", functools.partial(_copies, size, device)
    for name in _PACKAGES:
        yield name, functools.partial(_version, name)
    yield "python", platform.python_version
    yield "cuda", lambda: str(torch.version.cuda)


def parts(device: torch.device) -> Cases:
    """What a private step adds: sums of kept gradients, Gram matrices, weighted products."""
    small = 1 if device.type == "cuda" else 64
    for rows, numbers in ((4, 2**24), (8, 2**22), (16, 2**20)):
        yield (
            f"sum of {rows} kept gradients of {numbers:,} numbers",
            functools.partial(_sum, rows, numbers // small, device),
        )
    for batch, length, width in ((8, 512, 8192), (4, 1024, 2048)):
        of = f"{batch} x {length} x {width}"
        yield f"Gram matrices of {of}", functools.partial(_gram, batch, length, width // small, device)
        yield f"weighted sum of {of} and as many", functools.partial(_weighted, batch, length, width // small, device)


def _sum(rows: int, numbers: int, device: torch.device) -> str:
    values, out = torch.randn(rows, numbers, device=device), torch.zeros(numbers, device=device)
    chosen = Chosen(torch.rand(rows, device=device))
    seconds = _best(functools.partial(chosen.add_weighted_, out, values), device)
    return f"{values.nbytes / seconds / 1e9:.0f} GB/s of them"


def _gram(batch: int, length: int, width: int, device: torch.device) -> str:
    rows = torch.randn(batch, length, width, device=device).bfloat16()
    seconds = _best(functools.partial(products.inner, rows, rows.mT), device)
    return f"{2 * batch * length**2 * width / seconds / 1e12:.1f} TFLOP/s"


def _weighted(batch: int, length: int, width: int, device: torch.device) -> str:
    sides = [torch.randn(batch, length, n, device=device).bfloat16() for n in (width, width)]
    out, weights = torch.zeros(width, width, device=device), torch.rand(batch, device=device)
    seconds = _best(lambda: products.add_weighted_(out, *sides, weights, 1.0), device)
    return f"{2 * batch * length * width**2 / seconds / 1e12:.1f} TFLOP/s"


def _products(size: int, dtype: torch.dtype, device: torch.device) -> str:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return f"{2 * size**3 / _best(functools.partial(torch.matmul, a, b), device) / 1e12:.1f} TFLOP/s"


def _copies(size: int, device: torch.device) -> str:
    rows = torch.empty(size * size, device=device)
    return f"{2 * rows.nbytes / _best(rows.clone, device) / 1e9:.0f} GB/s, read and written"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _best(call: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(5):
        measuring.settled(device)
        start = time.perf_counter()
        call()
        measuring.settled(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def speed(device: torch.device) -> Cases:
    """Ratios to an ordinary step in bf16, Opacus' beside them where it is there."""
    names = ["ordinary", "hf_dp", *(["opacus ghost"] if find_spec("opacus") else [])]
    setting = Setting(device, torch.bfloat16)
    for name, case in (GPU_CASES if device.type == "cuda" else SMALL_CASES).items():
        twice = ["hf_dp in two passes"] if case.checkpointing else []
        yield name, functools.partial(_speed, case, [*names, *twice], setting)


def _speed(case: Case, names: list[str], setting: Setting) -> str:
    steps: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    peaks: dict[str, float] = {}
    for name in names:
        try:
            steps[name], peaks[name] = _prepared(case, name, setting)
        except Exception as error:  # noqa: BLE001 - a variant that cannot run a case is a result
            failed[name] = told(error)
    if "ordinary" in failed:
        return failed["ordinary"]
    kernels = {name: _on_device(step, setting.device) for name, step in steps.items()}
    # Where others lie beside it, a step may take memory anew that it would otherwise have at hand: in a first turn,
    # and what it still takes after that is told.
    measuring.in_turns(steps, 1, setting.device)
    before = _taken(setting.device)
    seconds = measuring.in_turns(steps, 3, setting.device)
    taken = _taken(setting.device) - before
    tokens = MICRO_BATCHES * case.batch * case.length / statistics.median(seconds["ordinary"])
    held = f", {peaks['ordinary']:,.0f} MiB" if peaks["ordinary"] else ""
    found = [f"ordinary {tokens:,.0f} tokens a second{held}"]
    for name in names[1:]:
        if name in failed:
            found.append(f"{name} {failed[name]}")
            continue
        ratio = statistics.median(map(operator.truediv, seconds[name], seconds["ordinary"]))
        more = f", memory {peaks[name] / peaks['ordinary']:.2f} x" if peaks["ordinary"] else ""
        arithmetic = f" (predicted for an H100: {predicted(case):.2f} x)" if name == "hf_dp" else ""
        own = f", its kernels {kernels[name] / kernels['ordinary']:.2f} x" if kernels["ordinary"] else ""
        found.append(f"{name} {ratio:.2f} x{own}{arithmetic}{more}")
    return "; ".join([*found, *([f"{taken} times memory was taken anew"] if taken else [])])


def _taken(device: torch.device) -> int:
    """How often torch's allocator has asked the GPU for memory."""
    return int(torch.cuda.memory_stats(device).get("num_device_alloc", 0)) if device.type == "cuda" else 0


def _on_device(step: Callable[[], object], device: torch.device) -> float:
    """How long a GPU computes in a step, what it waits for its host left out, in seconds; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        measuring.settled(device)
    return sum(float(one.self_device_time_total) for one in seen.key_averages()) / 1e6


def _prepared(case: Case, name: str, setting: Setting) -> tuple[Callable[[], object], float]:
    """A step, and what torch's allocator on the GPU held for it at most, with its model, in MiB; 0 on a CPU."""
    is_gpu = setting.device.type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if is_gpu else 0
    step = VARIANTS[name](case, build(case, setting), batches(case, setting.device))
    # The first makes the optimizer's state.
    step()
    if not is_gpu:
        return step, 0.0
    measuring.settled(setting.device)
    torch.cuda.reset_peak_memory_stats()
    step()
    measuring.settled(setting.device)
    return step, (torch.cuda.max_memory_allocated() - before) / 2**20


def told(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
