"""Evaluations, for several processes: those that fail, and those by which the best checkpoint is chosen."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError
from tests.distributed.tasks import SHARDS, fsdp2_on_cpu, gathered, trainer
from tests.training.workbench import rows


def evaluated(path: str, what: str) -> tuple[str, int]:
    """Of a training with evaluations whose rows or whose metrics fail before the first step, what is said and how many
    steps were made."""
    run = trainer(path, "bert", 2, {"noise_multiplier": 1.0}, eval_strategy="steps", eval_steps=1, max_steps=1)
    if what == "rows":
        run.eval_dataset = [{"input_ids": None, "labels": 0}] * 8
    else:

        def metrics(_: Any) -> dict[str, float]:
            if not run.ledger.steps and (what == "metrics" or ranks.rank()):
                raise ValueError("too few rows")
            return {}

        run.compute_metrics = metrics
    try:
        run.train()
    except ConfigurationError as error:
        return error.found, run.ledger.steps
    return "trained", run.ledger.steps


def best_of_resumed(
    path: str, name: str, world: int, shards: str | None, resume: bool
) -> tuple[str, dict[str, Tensor]]:
    """The checkpoint that is best, which is the first one, and the parameters that it leaves at the end.

    Args:
        shards: the state_dict_type of FSDP2, or None for DDP.
        resume: from the second one.
    """
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    kept = {"fsdp": True, "fsdp_config": {"version": 2, **SHARDS, "state_dict_type": shards}} if shards else {}
    with fsdp2_on_cpu() if shards else nullcontext():
        run = trainer(path, name, world, {"noise_multiplier": 0}, **each, **best, **kept)
        run.eval_dataset = rows(8, seed=9)
        run.train(resume_from_checkpoint=f"{path}/checkpoint-2" if resume else None)
        return Path(run.state.best_model_checkpoint).name, gathered(run.model)
