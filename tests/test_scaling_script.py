"""The arithmetic of docs/scaling.md beside what two processes take and send."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_what_is_computed_is_what_is_measured() -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "scripts" / "scaling.py")]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "At most 4.7% off." in done.stdout
