"""The prediction of a step, operation by operation: in a process of its own, as torch pretends one device in each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow
_LINE = re.compile(
    r"ordinary (?P<ordinary>[\d,]+) ms, (?P<own>[\d,]+) operations; "
    r"private (?P<private>[\d,]+) ms, (?P<ours>[\d,]+); (?P<ratio>[\d.]+) x"
)


def test_lora_starts_hardly_more_than_an_ordinary_step() -> None:
    """Each costs as long as a small one takes to start, so with adapters their number is what a step costs."""
    command = [sys.executable, str(ROOT / "scripts" / "roofline.py"), "--case", "small, LoRA, checkpointing"]
    done = subprocess.run([*command, "--operations", "3"], capture_output=True, text=True, check=True, cwd=ROOT)
    first, python, *others = done.stdout.splitlines()
    found = _LINE.search(first)
    assert found is not None, done.stdout
    own, ours = (int(found[name].replace(",", "")) for name in ("own", "ours"))
    assert 1000 < own < ours < 1.3 * own
    assert 1.0 < float(found["ratio"]) < 1.3
    assert len(others) == 3
    found = re.search(r"Python on this machine: (?P<own>[\d,]+) ms, and (?P<ours>[\d,]+) ms", python)
    assert found is not None, done.stdout
    assert 0 < int(found["own"]) < int(found["ours"]) < 1000
