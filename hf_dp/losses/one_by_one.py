"""The model's own loss of each example by itself: of any model that returns one, in as many passes as examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
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
        UnsupportedModelError: the model returns no loss, or no single number.
    """
    given = {name: value for name, value in batch.items() if name != "num_items_in_batch"}
    size = next(len(value) for value in given.values() if isinstance(value, Tensor))

    def own(value: Any, i: int) -> Any:
        has_each = isinstance(value, (Tensor, list)) and len(value) == size
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
