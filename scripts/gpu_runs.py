"""What scripts/gpu.py runs in processes of their own: tests that need a GPU, and trainings."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch
from gpu_costs import Cases
from safetensors.torch import load_file
from torch import Tensor

from hf_dp.hub import load_report

ROOT = Path(__file__).resolve().parents[1]
# Of a training, in seconds.
_PATIENCE = {"cpu": 900, "cuda": 40}


def tests(device: torch.device) -> Cases:
    """Those of the repository that need a GPU, where pytest is there; of what fails the first lines."""
    chosen = ["-m", "gpu"] if device.type == "cuda" else ["-m", "not slow and not gpu", "-k", "test_no_noise"]
    yield "marked gpu", functools.partial(_tests, chosen)


def _tests(chosen: list[str]) -> str:
    if not find_spec("pytest"):
        return "-"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", f"--junitxml={file}"]
        # Others may need packages that are not there, and fail as they are read.
        marked = {str(f.parent) for f in (ROOT / "tests").rglob("*.py") if "mark.gpu" in f.read_text("utf-8")}
        folders = sorted(folder for folder in marked if not folder.endswith("distributed"))
        command = [sys.executable, "-m", "pytest", *options, *chosen, *folders]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not file.exists():
            return f"failed: {done.stdout.strip().splitlines()[-1][:200]}"
        cases = list(ElementTree.parse(file).iter("testcase"))
    bad = [
        (c.get("name"), found) for c in cases for kind in ("failure", "error") if (found := c.find(kind)) is not None
    ]
    said = [f"{name}: {(one.get('message') or '-').splitlines()[0][:150]}" for name, one in bad]
    skipped = sum(c.find("skipped") is not None for c in cases)
    return "; ".join([f"{len(cases) - len(bad) - skipped} passed", *(f"WRONG {one}" for one in said)])


def processes(device: torch.device) -> Cases:
    """DPTrainer under torchrun with one process, beside the same training without."""
    weights: dict[str, dict[str, Tensor]] = {}
    for layout in ("alone", "DDP", "FSDP2"):
        yield layout, functools.partial(_trained, layout, device, weights)


def _trained(layout: str, device: torch.device, weights: dict[str, dict[str, Tensor]]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        launcher = [] if layout == "alone" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        command = [sys.executable, *launcher, str(Path(__file__).with_name("one_rank.py")), layout, folder, device.type]
        paths = os.pathsep.join([str(ROOT), *sys.path])
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PATIENCE[device.type],
            env={**os.environ, "PYTHONPATH": paths},
        )
        if done.returncode:
            return f"failed: {done.stderr.strip().splitlines()[-1][:200]}"
        weights[layout] = load_file(Path(folder) / "model.safetensors")
        epsilon = load_report(folder).epsilon
    first, ours = weights["alone"], weights[layout]
    off = max(float((ours[n].double() - first[n].double()).norm() / first[n].double().norm()) for n in first)
    return f"{'as alone, off' if off < 1e-4 else 'WRONG by'} {off:.0e}; epsilon {epsilon:.4f}"
