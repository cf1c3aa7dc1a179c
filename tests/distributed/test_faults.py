"""A rank that fails takes the run with it, and the run that goes on from the checkpoint tells the right epsilon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hf_dp.config import PrivacyConfig
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.plan import Plan
from tests.distributed.faulty import finished
from tests.distributed.gang import ON_GPU, Gang
from tests.distributed.tasks import EXPECTED, STEPS, farthest, gathered, trained
from tests.training.workbench import ROWS

SCRIPT = Path(__file__).with_name("faulty.py")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
# How long a run may take, and so how soon one must end in which a rank has failed.
_PATIENCE = 600


def launch(*arguments: str, launcher: tuple[str, ...] = TORCHRUN) -> subprocess.CompletedProcess[str]:
    root = SCRIPT.parents[2]
    where = {ON_GPU: "yes"} if torch.cuda.device_count() > 1 else {"ACCELERATE_USE_CPU": "true"}
    return subprocess.run(
        [sys.executable, "-m", *launcher, str(SCRIPT), *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **where},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )


def goes_on(path: Path, pair: Gang | None = None) -> None:
    """The run of that directory ends well from its checkpoint, launched or by a pair of processes that are there, and
    says what the whole of it cost."""
    assert (path / "checkpoint-2").is_dir()
    assert not (path / "final").exists()
    if pair is None:
        went_on = launch(str(path))
        assert went_on.returncode == 0, went_on.stderr[-3000:]
    else:
        pair.run(finished, str(path))
    report = json.loads((path / "final" / "privacy.json").read_text())["report"]
    entropy = Entropy(0)
    plan = Plan.make(PrivacyConfig(target_epsilon=8.0), PoissonBatchSampler.of(ROWS, EXPECTED, entropy), STEPS, entropy)
    assert report["steps"] == STEPS
    assert report["noise_multiplier"] == plan.noise_multiplier
    assert report["sampling_probability"] == EXPECTED / ROWS
    assert 7.9 < report["epsilon"] <= 8.0


@pytest.mark.slow
def test_a_rank_killed_in_a_step_and_what_comes_after(tmp_path: Path, pair: Gang) -> None:
    doomed = Gang(2, pair.backend)
    (_, said), killed = doomed.attempt(finished, str(tmp_path), "meet", 1)
    doomed.dismiss()
    assert killed == ("error", None)
    assert "RanksError" in said
    assert "gloo" not in said.splitlines()[-1]
    goes_on(tmp_path, pair)


@pytest.mark.slow
def test_a_rank_of_torchrun_killed_in_a_step_and_what_comes_after(tmp_path: Path) -> None:
    died = launch(str(tmp_path), "meet", "1")
    assert died.returncode != 0
    assert "gloo" not in died.stderr
    assert "SIGKILL" in died.stderr or "Signal 9" in died.stderr
    goes_on(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_the_first_rank_killed_between_charge_and_noise(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    died = launch(str(tmp_path), "release", "0", launcher=launcher)
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr or "Signal 9" in died.stderr
    goes_on(tmp_path)


@pytest.mark.slow
def test_a_refusal_is_the_last_thing_seen_and_once(tmp_path: Path) -> None:
    refused = launch(str(tmp_path), "refused")
    assert refused.returncode != 0
    assert refused.stderr.count("max_grad_norm=5.0.") == 1, refused.stderr
    # That of torchrun.
    assert refused.stderr.count("Traceback (most recent call last)") == 1
    *_, fix, line = refused.stderr.strip().splitlines()
    assert "What to do: leave max_grad_norm out" in fix
    assert set(line) == {"="}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_rank_killed_in_a_save(tmp_path: Path, victim: str) -> None:
    died = launch(str(tmp_path), "save", victim)
    assert died.returncode != 0
    assert not (tmp_path / "checkpoint-4").exists()
    goes_on(tmp_path)
    assert not (tmp_path / "_saving").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["collator", "callback"])
def test_what_one_rank_met_is_the_last_thing_seen(tmp_path: Path, fault: str) -> None:
    died = launch(str(tmp_path), fault, "1")
    assert died.returncode != 0
    *_, reason, line = died.stderr.strip().splitlines()
    assert "OSError: a row that cannot be read" in reason
    assert set(line) == {"="}
    assert "gloo" not in died.stderr
    assert not (tmp_path / "final").exists()


@pytest.mark.slow
def test_workers_that_read_ahead(tmp_path: Path) -> None:
    went_well = launch(str(tmp_path / "two"), "workers")
    assert went_well.returncode == 0, went_well.stderr[-3000:]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two" / "final")
    alone = trained(str(tmp_path / "one"), "bert", 1)
    assert farthest(gathered(model), alone["parameters"]) < 1e-5
