"""Trainings on pairs of answers, in a process of a gang or in one by itself."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from datasets import load_from_disk

from tests.distributed.tasks import device, fresh_accelerator, gathered, promise
from tests.training.answers import ROWS, DPDPOTrainer, DPRewardTrainer, make, moved, pairs, references

EXPECTED, MICRO, STEPS = 8, 2, 3
BY_USER = {"unit": "user", "max_examples_per_unit": 2}


def on_disk(path: Path, case: str, world: int) -> Any:
    """The pairs, from files that all processes read: TRL's read there what the first has made of the reference."""
    if world == 1 or dist.get_rank() == 0:
        data = pairs().add_column("user", [f"u{i * i % 29}" for i in range(ROWS)])
        (data if case == "by user" else data.remove_columns("user")).save_to_disk(path)
    if world > 1:
        dist.barrier()
    return load_from_disk(path)


def preferred(path: str, case: str, world: int) -> dict[str, Any]:
    """The parameters after `STEPS` steps with seeded noise, what was logged, and the report."""
    fresh_accelerator()
    values: dict[str, Any] = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": EXPECTED // (MICRO * world),
        "max_steps": STEPS, "learning_rate": 0.3, "use_cpu": device().type == "cpu",
    }  # fmt: skip
    if world > 1:
        values["ddp_backend"] = "gloo" if device().type == "cpu" else "nccl"
    kind = DPRewardTrainer if case == "rewards" else DPDPOTrainer
    privacy = promise(noise_multiplier=0.5, **(BY_USER if case == "by user" else {}))
    reference = references().get(case, {})
    data = on_disk(Path(path, "data"), case, world)
    trainer = make(
        Path(path), kind, privacy, train_dataset=data, **values, **{**reference, "gradient_checkpointing": False}
    )
    before = gathered(moved(trainer.model))
    trainer.train()
    return {
        "before": before,
        "parameters": gathered(trainer.model),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "wrapped": type(trainer.model_wrapped).__name__,
        "report": trainer.privacy_report(),
    }


def preferred_alone(case: str) -> dict[str, Any]:
    """`preferred` by one process, in a folder that goes."""
    with TemporaryDirectory() as path:
        return preferred(path, case, 1)
