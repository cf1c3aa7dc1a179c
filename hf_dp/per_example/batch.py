"""What a batch and its losses are to the engine: one row and one loss for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dp.errors import ConfigurationError, UnsupportedModelError

Batch = Mapping[str, Any]
LossFunction = Callable[[Any, Any], Tensor]


def batch_size(batch: Batch) -> int:
    """The number of examples: the first dimension that all tensors of `batch` share.

    Raises:
        ConfigurationError: no mapping, no tensor, or tensors that disagree.
    """
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)} if isinstance(batch, Mapping) else {}
    rows = {k: int(v.shape[0]) if v.dim() else None for k, v in tensors.items()}
    if len(set(rows.values())) != 1 or None in rows.values() or 0 in rows.values():
        found = rows or f"a {type(batch).__name__} without tensors"
        raise ConfigurationError(
            f"a batch must be a mapping of tensors with one row for each example; found rows {found}.",
            why="an example's gradient is known only where its row is known.",
            fix="let the collator return a dict of tensors (B, ...); drop shared tensors, it is easy to rebuild them.",
        )
    return next(iter(rows.values())) or 0


def take(batch: Batch, index: Sequence[int]) -> dict[str, Any]:
    """The examples in `index`, in that order, repeats included, of tensors and of lists with an entry for each example.

    Other values are passed through.
    """
    size = next((len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim()), None)

    def taken(value: Any) -> Any:
        if isinstance(value, Tensor):
            rows = value.detach().index_select(0, torch.tensor(list(index), device=value.device))
            # A model that asks a batch for gradients would go back through what was taken from it twice.
            return rows.requires_grad_(value.requires_grad)
        return [value[i] for i in index] if isinstance(value, list) and len(value) == size else value

    return {k: taken(v) for k, v in batch.items()}


def laid_out(batch: Batch) -> Batch:
    """With all tensors as `take` gives them: what is a view of a larger one, say, would be read otherwise than that."""
    apart = {k: v.contiguous() for k, v in batch.items() if isinstance(v, Tensor) and not _is_laid_out(v)}
    return {**batch, **apart} if apart else batch


def _is_laid_out(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.requires_grad or tensor.is_contiguous():
        return True
    return tensor.is_contiguous(memory_format=torch.channels_last)


def check_losses(losses: Tensor, size: int) -> None:
    """Refuses anything but one differentiable loss for each of `size` examples."""
    if not isinstance(losses, Tensor) or losses.shape != (size,) or not losses.is_floating_point():
        found = f"{tuple(losses.shape)} of {losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigurationError(
            f"the loss function returned {found}, not ({size},) of floating point.",
            why="clipping needs one loss for each example, depending on that example alone.",
            fix='return the loss of each example, as torch does by reduction="none" (of several numbers of one example '
            "their mean or sum), and hf_dp.losses.per_example_losses(model, batch) for heads of Transformers.",
        )
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise UnsupportedModelError(
            "the loss does not depend on any trainable parameter.",
            why="there is nothing to train, and epsilon would be spent for nothing.",
            fix="unfreeze some parameters (requires_grad_(True)), or add an adapter; with gradient checkpointing of "
            "what follows from frozen embeddings, set gradient_checkpointing_kwargs={'use_reentrant': False}.",
        )
