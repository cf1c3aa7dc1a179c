"""Three seeded private steps, and their weights: what scripts/gpu.py runs alone and under torchrun.

python scripts/one_rank.py alone|DDP|FSDP2 DIRECTORY cpu|cuda
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from hf_dp import DPTrainer, PrivacyConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.tasks import SHARDS, fsdp2_on_cpu
from tests.training.workbench import pad_for_language, rows
from tests.zoo import tiny


def train(layout: str, folder: str, device: str) -> None:
    """Saves the model, its record and its weights, as they are whole, in `folder`."""
    sharded: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS}} if layout == "FSDP2" else {}
    args = TrainingArguments(
        folder, per_device_train_batch_size=8, max_steps=3, learning_rate=0.1, optim="sgd", report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=device == "cpu", **sharded,
    )  # fmt: skip
    model = tiny("llama", "causal_lm", torch.float32)
    privacy = PrivacyConfig(target_epsilon=8.0, seed=5)
    with fsdp2_on_cpu() if device == "cpu" else nullcontext():
        trainer = DPTrainer(
            model=model, args=args, train_dataset=rows(), data_collator=pad_for_language, privacy=privacy
        )
        trainer.train()
        trainer.save_model(folder)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(*sys.argv[1:])
