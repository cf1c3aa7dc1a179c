"""A rank that dies takes the run with it, and the run that goes on from the checkpoint tells the right epsilon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hf_dp.config import PrivacyConfig
from hf_dp.plan import Plan
from hf_dp.randomness import Entropy
from hf_dp.sampling import PoissonBatchSampler
from tests.distributed.tasks import EXPECTED, STEPS
from tests.e2e.workbench import ROWS

SCRIPT = Path(__file__).with_name("killed.py")
_PATIENCE = 180


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = SCRIPT.parents[2]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(SCRIPT), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
    )


def test_a_killed_rank_and_what_comes_after(tmp_path: Path) -> None:
    died = launch(str(tmp_path), "1", "3")
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr or "Signal 9" in died.stderr
    assert (tmp_path / "checkpoint-2").is_dir()
    assert not (tmp_path / "final").exists()
    went_on = launch(str(tmp_path))
    assert went_on.returncode == 0, went_on.stderr[-3000:]
    report = json.loads((tmp_path / "final" / "privacy.json").read_text())["report"]
    entropy = Entropy(0)
    plan = Plan.make(PrivacyConfig(target_epsilon=8.0), PoissonBatchSampler(ROWS, EXPECTED, entropy), STEPS, entropy)
    assert report["steps"] == STEPS
    assert report["noise_multiplier"] == plan.noise_multiplier
    assert report["sampling_probability"] == EXPECTED / ROWS
    assert 7.9 < report["epsilon"] <= 8.0
