"""Optimizers that would spend budget for nothing, or see what has no noise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dp.errors import ConfigurationError


def refuse_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuses optimizers that ask for the gradient again, or that would train nothing. None is in order.

    Raises:
        ConfigurationError: with its name.
    """
    if optimizer is None:
        return
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{type(optimizer).__name__} evaluates the gradient several times in one step.",
            why="each evaluation would be one more release, and none of them would have noise.",
            fix="use an optimizer that takes one gradient for each step, such as the default adamw_torch.",
        )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in trained for p in model.parameters() if p.requires_grad):
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds none of the model's trainable parameters.",
            why="nothing would be trained, and epsilon would be spent for nothing.",
            fix="make the optimizer when the model is complete (after adding adapters, say), or leave it out.",
        )


def refuse_weight_decay(trainer: Any, tables: Mapping[str, Any]) -> None:
    """Refuses weight decay that Trainer's own optimizer would put on embedding tables with sparse gradients.

    Raises:
        ConfigurationError: with the table's name.
    """
    if trainer.optimizer is None and trainer.args.weight_decay:
        raise ConfigurationError(
            f"weight_decay={trainer.args.weight_decay} with sparse gradients of {', '.join(tables)}.",
            why="weight decay moves all rows of a table in every step, so nothing about it would stay sparse.",
            fix="set weight_decay=0, or pass an optimizer of your own for the other parameters: "
            "optimizers=(AdamW([...], weight_decay=...), None).",
        )
