"""Evaluations that fail, for several processes."""

from __future__ import annotations

from typing import Any

import hf_dp.ranks as ranks
from hf_dp.errors import ConfigurationError
from tests.distributed.tasks import trainer


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
