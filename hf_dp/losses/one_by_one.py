"""The model's own loss of each example by itself: of any model that returns one, in as many passes as examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses.kinds import SAY_IT, base_model
from hf_dp.losses.outputs import named


def own_losses(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """What the model returns as its loss of each example, shown to it alone.

    For models whose own loss is none of those that `per_example_losses` knows, or shares a denominator over the batch:
    of one example that is its own. Weights of classes that a mean is divided by again do nothing there.

    Args:
        model: any module that computes a loss: under `loss`, as a number in a tuple, or alone.
        batch: what it is given, labels too, each (B, ...); lists have an entry for each example.

    Returns:
        (B,) the losses. It takes about B times as long as one pass over all, and no checkpointing of gradients.

    Raises:
        UnsupportedModelError: the model returns no loss, or no single number; or is in shards (FSDP2), whose ranks must
            call it as often as one another.
        ConfigurationError: no tensor of `batch` has rows.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any(isinstance(module, FSDPModule) for module in modules):
        raise UnsupportedModelError(
            "own_losses of a model that FSDP2 keeps in shards.",
            why="it calls the model once for each example, and ranks whose shares have other numbers of these would "
            "wait for one another for ever.",
            fix="use DDP, or a loss that calls the model once for all examples.",
        )
    given = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
    size = next((len(value) for value in given.values() if isinstance(value, Tensor) and value.dim()), None)
    if size is None:
        raise ConfigurationError(
            f"a batch of {', '.join(given) or 'nothing'} holds no tensor with a row for each example.",
            why="how many losses there are, and of which rows, is read from that.",
            fix="give own_losses what the collator returns: a mapping of tensors (B, ...).",
        )

    def own(value: Any, i: int) -> Any:
        has_each = isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)
        has_each = has_each and len(value) == size
        return value[i : i + 1] if has_each else value

    return torch.stack([_loss(model, {name: own(value, i) for name, value in given.items()}) for i in range(size)])


def _loss(model: nn.Module, one: Mapping[str, Any]) -> Tensor:
    loss = named(model(**one), "loss")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"numbers {tuple(loss.shape)} as its loss" if isinstance(loss, Tensor) else "no loss"
        raise UnsupportedModelError(
            f"{type(base_model(model)).__name__} returns {found} of one example.",
            why="what is to be made small for it is unknown.",
            fix=f"give it what it computes its loss of (labels, most often), or {SAY_IT} that computes one.",
        )
    return loss.reshape(())
