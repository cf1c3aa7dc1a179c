"""Pairs of answers, and TRL's trainers of preferences behind the mixin; skips where TRL is absent."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import nn
from transformers import LlamaForSequenceClassification

from hf_dp import PrivacyConfig
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.chats import a_model, adapter, said, tokenizer
from tests.training.workbench import private

trl = pytest.importorskip("trl")

ROWS, MICRO, EXPECTED = 40, 3, 9


class DPDPOTrainer(DPTrainerMixin, trl.DPOTrainer):
    pass


class DPRewardTrainer(DPTrainerMixin, trl.RewardTrainer):
    pass


def pairs(n: int = ROWS) -> Dataset:
    draw = random.Random(0)
    rows = [{"prompt": said(draw), "chosen": " " + said(draw), "rejected": " " + said(draw)} for _ in range(n)]
    return Dataset.from_list(rows)


def make(path: Path, kind: Any = DPDPOTrainer, privacy: PrivacyConfig | None = None, **parts: Any) -> Any:
    """A trainer of `kind`; `parts` are the trainer's arguments or those of its config."""
    own = ("model", "train_dataset", "eval_dataset", "peft_config", "ref_model")
    given = {name: parts.pop(name) for name in own if name in parts}
    values: dict[str, Any] = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": EXPECTED // MICRO, "max_steps": 1,
        "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "weight_decay": 0.0, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip
    if issubclass(kind, DPTrainerMixin):
        given["privacy"] = privacy or private()
    is_reward = issubclass(kind, trl.RewardTrainer)
    if not is_reward:
        values["precompute_ref_log_probs"] = True
    config = (trl.RewardConfig if is_reward else trl.DPOConfig)(str(path), **{**values, **parts})
    model = rewarding() if is_reward else a_model()
    return kind(args=config, **{"model": model, "train_dataset": pairs(), "processing_class": tokenizer(), **given})


def rewarding() -> nn.Module:
    torch.manual_seed(1)
    config = a_model().config
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def moved(model: nn.Module) -> nn.Module:
    """As after some steps: at the reference itself some losses have no curvature, and all pairs the same loss."""
    torch.manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn_like(p)
    return model


def references() -> dict[str, dict[str, Any]]:
    now = {"precompute_ref_log_probs": False}
    return {
        "adapter switched off": {"peft_config": adapter(), "gradient_checkpointing": True, **now},
        "copy of an adapter": {"model": get_peft_model(a_model(), adapter()), **now},
        "a model of its own": {"ref_model": moved(a_model()), **now},
        "a model of its own, beforehand": {"ref_model": moved(a_model()).eval()},
    }
