"""What a step of DPTrainer takes beside one of Trainer: as many steps of each, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["small", "small, autocast"])
def test_both_trainers_make_their_steps(case: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark_trainers.py"), "--case", case, "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = re.search(r"Trainer takes (?P<own>[\d.]+) s, one of DPTrainer (?P<ratio>[\d.]+) of it", done.stdout)
    assert found is not None, done.stdout
    assert float(found["own"]) > 0
    assert float(found["ratio"]) > 1  # Of so small a model it is the engine's Python.
    assert "Traceback" not in done.stderr
