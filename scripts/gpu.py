"""All that a GPU can tell, in one run of at most eight minutes: is it exact there, is noise noise, and what is a step?

    python scripts/gpu.py --output DIR
    python scripts/gpu.py --output DIR --cpu           all of it, small, on a CPU; a test runs this

DIR gets gpu.json and gpu.md. For a machine that reaches no registry, but has torch, transformers, accelerate, peft,
scipy, pandas, pyarrow, typer, rich, attrs and absl-py, carry the rest, downloaded for the Python that is there:

    python -m pip download --no-deps --only-binary :all: --python-version 3.12 --dest build/wheels \\
        dp-accounting datasets dm-tree immutabledict multiprocess dill evaluate randomgen
    cd REPOSITORY && python3 -m pip install -q --no-index --no-deps --target build/site build/wheels/*.whl && \\
        PYTHONPATH=.:build/site python3 scripts/gpu.py --output DIR

With --only and the name of a section (several times, if need be) those alone are run, and added to what DIR has; with
--case and the name of a case as well (`--only "Speed and memory" --case "Llama 1B, 8 x 1024, LoRA r 16"`), that alone.
What is there must be as new as constraints-oldest.txt (torch 2.11, transformers 5.17, accelerate 1.10.1, peft 0.20);
all but torch can be carried too, and goes before. Versions are written down with the results. Opacus, bitsandbytes and
torchao are held beside where they are carried.

Gradients are held against a loop over single examples on the same device. A case that fails says so in its place and
ends no other. Each section is a process of its own, which ends when its time is over: after an error of CUDA's none of
its process goes on. What it leaves of its time is the next ones'. Times and memory are ratios to an ordinary step, the
variants taking turns, as in scripts/benchmark.py; peak memory is what torch's allocator takes for one step.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from scipy import stats
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_dp.losses import per_example_losses
from hf_dp.noise.chacha20 import ChaCha20Noise
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.noise.grid import GridNoise
from hf_dp.noise.source import NoiseSource
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.precision import computed_in
from hf_dp.randomness import Entropy

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpu_costs import Cases, machine, parts, speed, told  # noqa: E402
from gpu_runs import processes, tests  # noqa: E402
from measuring import settled  # noqa: E402

from scripts import coverage, judging  # noqa: E402
from tests import low_bits, zoo  # noqa: E402

FAMILIES = {
    **dict.fromkeys(("gpt2", "llama_tied", "qwen3", "gemma3", "opt", "mamba"), "causal_lm"),
    **dict.fromkeys(("bert", "modernbert"), "sequence"),
    "t5": "seq2seq",
    "vit": "image",
}
_PRECISIONS = {
    "float64": torch.float64, "float32": torch.float32, "float32 with TF32": torch.float32,
    "bf16 weights": torch.bfloat16, "bf16 autocast": torch.float32,
}  # fmt: skip
# Of the model itself, in few bits and on five short rows.
_ROUNDING = 0.03
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# --- is it exact? ---------------------------------------------------------------------------------------------------


def exactness(device: torch.device) -> Cases:
    """Families in every precision."""
    for family, head in FAMILIES.items():
        for precision in _PRECISIONS:
            yield f"{family}, {precision}", functools.partial(_exact, family, head, precision, device)


def _exact(family: str, head: str, precision: str, device: torch.device) -> str:
    dtype = _PRECISIONS[precision]
    model = zoo.tiny(family, head, dtype).to(device)
    batch = _moved(zoo.batches_of(family, head)(5, 7, max(dtype, torch.float32, key=lambda d: d.itemsize)), device)
    if "bf16" in precision:
        oracle = zoo.tiny(family, head, dtype).to(device).float()
        return judging.judge_low_precision(model, oracle, batch, "autocast" in precision, _ROUNDING)
    # Convolutions have TF32 unless told otherwise.
    libraries: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    before = [library.fp32_precision for library in libraries]
    try:
        for library in libraries:
            library.fp32_precision = "tf32" if "TF32" in precision else "ieee"
        tolerance = _ROUNDING if "TF32" in precision else judging.TOLERANCE[dtype]
        off = _off(model, batch)
        if dtype == torch.float64 and not off <= tolerance:
            # Some families compute parts in float32 whatever they are in.
            with computed_in(model, batch, dtype):
                off = _off(model, batch)
        return f"exact {off:.0e}" if off <= tolerance else f"WRONG by {off:.1g}"
    finally:
        for library, value in zip(libraries, before, strict=True):
            library.fp32_precision = value


def _off(model: nn.Module, batch: dict[str, Tensor]) -> float:
    found = record(model, per_example_losses, batch, certificate=preflight(model, per_example_losses, batch))
    return judging.error(found, loop(model, per_example_losses, batch))


def _moved(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}


def attention(device: torch.device) -> Cases:
    """Kernels of attention, each alone, with and without Re-Attention, in bf16 beside a loop in float32."""
    kernels: dict[str, tuple[str, SDPBackend | None]] = {
        "eager": ("eager", None), "sdpa": ("sdpa", None), "math": ("sdpa", SDPBackend.MATH),
    }  # fmt: skip
    if device.type == "cuda":
        kernels |= {
            "flash": ("sdpa", SDPBackend.FLASH_ATTENTION),
            "memory-efficient": ("sdpa", SDPBackend.EFFICIENT_ATTENTION),
            "cuDNN": ("sdpa", SDPBackend.CUDNN_ATTENTION),
        }
        kernels |= {name: (name, None) for name in ("flash_attention_2",) if find_spec("flash_attn")}
    for name, (implementation, kernel) in kernels.items():
        for corrected in (False, True):
            what = f"{name}{' with Re-Attention' if corrected else ''}"
            yield what, functools.partial(_attention, implementation, kernel, corrected, device)


def _attention(name: str, kernel: SDPBackend | None, corrected: bool, device: torch.device) -> str:
    from hf_dp import ReAttentionConfig
    from hf_dp.parts.re_attention import ReAttention
    from hf_dp.parts.re_attention.deviations import one_step, relative_counts

    def made(dtype: torch.dtype, implementation: str) -> Any:
        # Memory-efficient attention has as many heads of keys as of queries.
        shape = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        model: Any = zoo.tiny("llama", "causal_lm", dtype, **shape).to(device)
        model.set_attn_implementation(implementation)
        if corrected:
            model.re_attention = ReAttention(model, ReAttentionConfig(token_frequencies="uniform"))
            counts = relative_counts(model, 8.0, torch.linspace(0.01, 1.0, zoo.VOCABULARY, device=device))
            model.re_attention.errors = one_step(counts, 0.01)
        return model

    ids = torch.randint(3, zoo.VOCABULARY, (4, 64), device=device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    exact, judged = made(torch.bfloat16, "eager").float(), made(torch.bfloat16, name)
    forward = judged.forward

    @functools.wraps(forward)
    def by_kernel(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            return forward(*args, **kwargs)

    # Not around all of it: the loop beside it computes in float32, which some of these cannot.
    judged.forward = by_kernel
    return judging.judge_low_precision(judged, exact, batch, tolerance=_ROUNDING)


def few_bits(device: torch.device) -> Cases:
    """LoRA over frozen bases in few bits."""
    for kind in low_bits.KINDS:
        yield kind, functools.partial(coverage.judge_quantised, kind, str(device))


# --- is noise noise? ------------------------------------------------------------------------------------------------


def noise(device: torch.device) -> Cases:
    """The streams on this device, with a control that must fail."""
    for source in (GaussianNoise, ChaCha20Noise, GridNoise):
        yield source.__name__, functools.partial(_noise, source, device)


def _noise(kind: type[NoiseSource], device: torch.device, size: int | None = None, sigma: float = 3.0) -> str:
    size = size or (2**26 if device.type == "cuda" else 2**20)
    one, two, later = (torch.zeros(size, device=device) for _ in range(3))
    source, start = kind(Entropy(None)), time.perf_counter()
    source.add_([one, two], sigma, 0)
    source.add_([later], sigma, 1)
    settled(device)
    rate = 3 * size / (time.perf_counter() - start)
    few = [values[: 2**20].double().cpu().numpy() for values in (one, two, later)]
    fits = min(float(stats.kstest(values, stats.norm(0, sigma).cdf).pvalue) for values in few)
    squares = (one.double() / sigma).square().sum().item()
    spread = 2 * min(stats.chi2.cdf(squares, size), stats.chi2.sf(squares, size))
    related = min(float(stats.pearsonr(few[0], other).pvalue) for other in few[1:])
    control = float(stats.kstest(few[0], stats.norm(0, 1.5 * sigma).cdf).pvalue)
    good = min(fits, spread, related) > 1e-4 and control < 1e-9
    shown = f"p {fits:.2g} (normal), {spread:.2g} (variance), {related:.2g} (correlation)"
    return f"{shown}, control {control:.0e}; {rate:.1e} a second" if good else f"WRONG: {shown}, control {control:.2g}"


# --- the whole ------------------------------------------------------------------------------------------------------


SECTIONS: dict[str, Callable[[torch.device], Cases]] = {
    "Machine": machine, "Speed and memory": speed, "Parts of a step": parts, "Tests": tests, "Exactness": exactness,
    "Noise": noise, "Attention": attention, "Processes": processes, "LoRA over a base in few bits": few_bits,
}  # fmt: skip
# Seconds on a GPU, of eight minutes, the starts of processes included.
SECONDS = {
    "Machine": 20, "Speed and memory": 190, "Parts of a step": 20, "Tests": 50, "Exactness": 80, "Noise": 25,
    "Attention": 25, "Processes": 50, "LoRA over a base in few bits": 20,
}  # fmt: skip


@app.command()
def run(
    output: Annotated[Path, typer.Option(help="Where gpu.json and gpu.md go.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="Small, on a CPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Sections to run; all by default.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Of one section the cases to run; all by default.")] = None,
) -> None:
    """Runs every section in a process of its own, or one in this one; after each case all that is known is written."""
    device = torch.device("cpu" if cpu else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is there; --cpu runs all of it small")
    titles = only or list(SECTIONS)
    known = [name for name, _ in SECTIONS[titles[0]](device)] if len(titles) == 1 else []
    if missing := {*(case or [])}.difference(known):
        raise typer.BadParameter(f"--case is of one section, given by --only: no {', '.join(sorted(missing))} is there")
    output.mkdir(parents=True, exist_ok=True)
    file = output / "gpu.json"
    if only is None:
        file.unlink(missing_ok=True)
    left = 0.0
    for title in titles:
        if len(titles) == 1:
            _section(title, device, file, case)
            continue
        start, left = time.monotonic(), left + SECONDS[title]
        ended = _alone(["--output", str(output), "--only", title, *(["--cpu"] if cpu else [])], None if cpu else left)
        left -= time.monotonic() - start
        results = _known(file)
        for name, _ in SECTIONS[title](device):
            results.setdefault(title, {}).setdefault(name, ended)
        _write(file, results, device)
    wrong = [f"{t}: {name}" for t in titles for name, text in _known(file)[t].items() if "WRONG" in text]
    if wrong:
        print(f"WRONG: {'; '.join(wrong)}")
        raise typer.Exit(1)


def _section(title: str, device: torch.device, file: Path, chosen: list[str] | None) -> None:
    results = _known(file)
    rows = results[title] = results.get(title, {}) if chosen else {}
    for name, case in SECTIONS[title](device):
        if chosen and name not in chosen:
            continue
        rows[name] = _answer(case)
        print(f"{title}: {name}: {rows[name]}", flush=True)
        _write(file, results, device)
        gc.collect()


def _alone(arguments: list[str], seconds: float | None) -> str:
    """Runs this script, and says what to write for cases that have no result."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], start_new_session=True)
    try:
        return f"not run: its process ended with {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        # With what it has started.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "not run: no time was left"


def _known(file: Path) -> dict[str, dict[str, str]]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}  # type: ignore[no-any-return]


def _write(file: Path, results: dict[str, dict[str, str]], device: torch.device) -> None:
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(markdown(results, device), encoding="utf-8")


def _answer(case: Callable[[], str]) -> str:
    try:
        return case()
    except Exception as error:  # noqa: BLE001 - what one case runs into is its result
        return told(error)


def markdown(results: dict[str, dict[str, str]], device: torch.device) -> str:
    """A table for each section."""
    where = "on a GPU" if device.type == "cuda" else "small, on a CPU"
    lines = [f"# Measured {where}", "", "Written by `python scripts/gpu.py`, which says how."]
    for title, rows in results.items():
        lines += ["", f"## {title}", "", "| | |", "| --- | --- |", *(f"| {n} | {text} |" for n, text in rows.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
