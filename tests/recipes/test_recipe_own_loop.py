"""recipes/own_loop.py: DPTrainer's weights from a plain loop, resumed where it was left, on two processes too."""

from __future__ import annotations

import copy
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

import hf_dp
from hf_dp import DPTrainer
from hf_dp.hub import verify
from tests.distributed.tasks import farthest, fresh_accelerator
from tests.training.workbench import parameters, same

pytestmark = pytest.mark.usefixtures("checked_once")

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "own_loop.py"


@pytest.fixture
def words(encoder_directory, questions_directory, tmp_path):
    """Arguments of the recipe; without dropout, whose generator a head is made with in another order."""
    model = shutil.copytree(encoder_directory, tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(settings))
    data, labels = tmp_path / "train.csv", questions_directory / "categories.json"
    data.write_text((questions_directory / "train.csv").read_text().replace("label", "category", 1))
    sizes = ["--steps", "4", "--batch_size", "10", "--micro_batch_size", "5", "--seed", "5"]
    return [str(data), "--labels_file", str(labels), "--model", str(model), *sizes]


@pytest.fixture
def run(words, monkeypatch):
    """Runs the recipe in this process; its `PrivateRun`, with the model as it was when it was given."""

    def recipe(output_dir: Path):
        made = []

        class Remembered(hf_dp.PrivateRun):
            def __init__(self, model, dataset, privacy, collate, **options):
                made.extend((self, copy.deepcopy(model), dataset, privacy, collate))
                super().__init__(model, dataset, privacy, collate, **options)

        fresh_accelerator()
        monkeypatch.setattr(hf_dp, "PrivateRun", Remembered)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words, "--output_dir", str(output_dir)])
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return made

    return recipe


@pytest.mark.slow
def test_it_gives_what_dptrainer_gives_and_resumes(run, tmp_path):
    out = tmp_path / "out"
    own, model, dataset, privacy, collate = run(out)
    assert verify(out).consistent
    assert verify(out).report.steps == 4

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    fresh_accelerator()
    arguments = TrainingArguments(
        str(tmp_path / "trainer"), per_device_train_batch_size=5, gradient_accumulation_steps=2, max_steps=4,
        use_cpu=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = DPTrainer(model, arguments, collate, dataset, optimizers=(optimizer, scheduler), privacy=privacy)
    trainer.train()
    assert trainer.privacy_report() == own.report()
    assert same(parameters(model), parameters(own.model))

    shutil.rmtree(out / "checkpoint-4")
    (out / "model.safetensors").unlink()
    again, *_ = run(out)
    assert again.ledger == own.ledger
    assert same(parameters(again.model), parameters(own.model))
    assert verify(out).consistent


@pytest.mark.slow
def test_two_processes_of_accelerate_launch(run, words, tmp_path):
    out, alone = tmp_path / "two", tmp_path / "one"
    run(alone)
    launcher = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    for _ in range(2):  # the second goes on from the end, and saves
        done = subprocess.run(
            [sys.executable, "-m", *launcher, str(SCRIPT), *words, "--output_dir", str(out)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert farthest(load_file(out / "model.safetensors"), load_file(alone / "model.safetensors")) < 1e-4
    assert verify(out).consistent
    assert verify(out).report == verify(alone).report
