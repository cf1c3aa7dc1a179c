"""What is switched on around the steps: as it was when the engine was held against the oracle, or nothing is known."""

from __future__ import annotations

import torch
from torch import nn

from hf_dp.errors import ConfigurationError


def surroundings(model: nn.Module) -> dict[str, object]:
    """What decides in which precision a model computes, but for what it does itself.

    Raises:
        ConfigurationError: no gradients can be computed here.
    """
    _refuse_no_gradients()
    named = dict(model.named_parameters())
    kinds = sorted({p.device.type for p in named.values()})
    return {
        "torch.autocast": [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)],
        "dtype of weights": {name: p.dtype for name, p in named.items()},
    }


def refuse_other_surroundings(begun_in: dict[str, object], model: nn.Module) -> None:
    """Refuses a step in other `surroundings` than those that the training began in (`ConfigurationError`)."""
    now = surroundings(model)
    if others := [name for name in begun_in if _differs(now[name], begun_in[name])]:
        raise ConfigurationError(
            f"a private step with another {' and another '.join(others)} than the training began with.",
            why="that gradients are exact for each example was found out in that precision, and in no other.",
            fix="choose the precision before the training begins, and leave it.",
        )


def _differs(now: object, before: object) -> bool:
    """Of weights that are not those of before, others ask."""
    if isinstance(now, dict) and isinstance(before, dict):
        return any(before.get(name, dtype) != dtype for name, dtype in now.items())
    return now != before


def _refuse_no_gradients() -> None:
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise ConfigurationError(
            f"a private training under {mode}.",
            why="torch computes no gradients there.",
            fix="leave it for evaluations, and begin and step outside of it.",
        )
