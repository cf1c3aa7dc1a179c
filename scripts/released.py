"""Saves small private models for a release to keep: that it wrote them, every later version has to verify.

    python scripts/released.py

Writes `tests/hub/released/VERSION/` for tests/hub/test_released.py.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, TrainingArguments

from hf_dp import DPTrainer, PrivacyConfig, __version__

RELEASED = Path(__file__).resolve().parents[1] / "tests/hub/released"
KEPT = "README.md", "config.json", "model.safetensors", "privacy.json"
PROMISES: dict[str, dict[str, Any]] = {"plain": {}, "users": {"unit": "customer", "max_examples_per_unit": 2}}


def trained(folder: str, promise: dict[str, Any]) -> DPTrainer:
    """Of 240 made-up rows, three of each customer."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "dim": 8, "n_heads": 2, "n_layers": 1, "hidden_dim": 8, "max_position_embeddings": 16}
    model = DistilBertForSequenceClassification(DistilBertConfig(**sizes, num_labels=3))
    rows = Dataset.from_dict(
        {
            "input_ids": torch.randint(0, 60, (240, 12)).tolist(),
            "labels": torch.randint(0, 3, (240,)).tolist(),
            "customer": [f"c{row // 3}" for row in range(240)],
        }
    )
    arguments = TrainingArguments(folder, per_device_train_batch_size=32, max_steps=3, save_strategy="no", report_to=[])
    trainer = DPTrainer(
        model, arguments, train_dataset=rows, privacy=PrivacyConfig(target_epsilon=8.0, target_delta=1e-3, **promise)
    )
    trainer.train()
    return trainer


def main() -> None:
    """Both models, in place of what was there."""
    for name, promise in PROMISES.items():
        with tempfile.TemporaryDirectory() as folder:
            trained(folder, promise).save_model(folder)
            (kept := RELEASED / __version__ / name).mkdir(parents=True, exist_ok=True)
            for file in KEPT:
                shutil.copyfile(Path(folder) / file, kept / file)


if __name__ == "__main__":
    main()
