"""A training with Re-Attention under a budget in epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_dp import DPTrainer, ReAttentionConfig
from tests.training.workbench import make, private


def budgeted(path: Path, attention: ReAttentionConfig | None = None, model: Any = None, **changes: Any) -> DPTrainer:
    privacy = private(noise_multiplier=None, target_epsilon=3.0, re_attention=attention or ReAttentionConfig(), seed=7)
    made: DPTrainer = make(path, model, privacy, **changes)
    return made
