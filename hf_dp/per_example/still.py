"""Batch norms that keep the statistics they have: then each example's output is its own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_dp.errors import UnsupportedModelError


def still_batch_norm(model: nn.Module) -> list[str]:
    """Keeps each batch norm of a model in eval mode, whatever mode the model is in, where its weights train exactly.

    Its means and variances stay what they are, those of the data that it was pretrained on, which must be public.

    Args:
        model: whose modules are changed in place, before a trainer is made of it.

    Returns:
        Their names.

    Raises:
        UnsupportedModelError: one has no statistics of its own (`track_running_stats=False`), and takes those of each
            batch.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if without := [name for name, module in found.items() if module.running_mean is None]:
        raise UnsupportedModelError(
            f"{without[0]} has no statistics to keep (track_running_stats=False).",
            why="it takes those of each batch, in eval mode too, so no example's output is its own.",
            fix="replace it by GroupNorm or LayerNorm.",
        )
    for module in found.values():
        # Of an object's own, not of a class: it is copied, saved and loaded as before.
        module.__dict__["train"] = functools.partial(_stay, module)
        module.train()
        module.register_forward_pre_hook(_in_order)
        module.register_forward_hook(_with_gradients_in_order)
    return list(found)


def _in_order(module: nn.Module, given: Any) -> Any:
    """Of one picture by itself, and of pictures of one row or column, torch (2.13, on a CPU) takes values whose
    channels come last in memory for ones whose channels come first, or the reverse, and gives other gradients."""
    one, *others = given
    return (one.contiguous(), *others) if torch.is_grad_enabled() and _could_be_taken_for(module, one) else None


def _with_gradients_in_order(module: nn.Module, given: Any, made: Tensor) -> None:
    if made.requires_grad and _could_be_taken_for(module, made):
        made.register_hook(_contiguous)


def _could_be_taken_for(module: nn.Module, values: Tensor) -> bool:
    return not module.training and values.dim() > 3 and 1 in (len(values), *values.shape[2:])


def _contiguous(gradient: Tensor) -> Tensor:
    return gradient.contiguous()


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)
