"""Is the per-example loss of a model the loss that the model itself returns?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.losses.kinds import base_model, loss_kind
from hf_dp.losses.per_example import per_example_losses

# How far the model's own loss may be off, in its own precision.
_SAME = 1e-2


def check_own_loss(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Checks, on each example of a small batch by itself, that `per_example_losses` equals the loss the model returns.

    Some models shift labels where others of the same family do not, or add a loss for their router. An own loss that is
    not finite (an example without labels) is not compared.

    Raises:
        UnsupportedModelError: they differ, or the model's own cannot be computed, or is none.
    """
    batch = {k: v for k, v in batch.items() if k != "num_items_in_batch"}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})

    def losses(of: Callable[[nn.Module, Mapping[str, Any]], Any], batch: Mapping[str, Any]) -> Any:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            return of(model, batch)

    for i, ours in enumerate(losses(per_example_losses, batch).tolist()):
        one = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in batch.items()}
        own = losses(_own_loss, one)
        if own is None:
            raise UnsupportedModelError(
                f"{type(base_model(model)).__name__} returns no loss of its own for labels.",
                why="what it was made to be trained for is unknown, and so whether the per-example loss is that.",
                fix="override DPTrainer.compute_per_example_loss(model, inputs).",
            )
        if not bool(own.isfinite()) or _is_same(ours, float(own)):
            continue
        # With dropout, that of the example by itself has the same masks.
        ours = float(losses(per_example_losses, one))
        if not _is_same(ours, float(own)):
            raise UnsupportedModelError(
                f"{type(base_model(model)).__name__} returns {float(own):.6g} as its loss of one example; "
                f"the per-example loss of its kind ({loss_kind(model)}) is {ours:.6g}.",
                why="it would be trained for something else than what it was made for.",
                fix="switch off auxiliary losses (output_router_logits=False), or override "
                "DPTrainer.compute_per_example_loss(model, inputs).",
            )


def _is_same(ours: float, own: float) -> bool:
    return abs(ours - own) <= _SAME * max(1.0, abs(own))


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    try:
        return getattr(model(**batch), "loss", None)
    except (HfDpError, torch.OutOfMemoryError):
        raise
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        name, problem = type(base_model(model)).__name__, f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"{name} cannot compute its own loss of one example ({problem}).",
            why="what it was made to be trained for is unknown, and so whether the per-example loss is that.",
            fix="give it all inputs that its forward pass takes with labels, or override "
            "DPTrainer.compute_per_example_loss(model, inputs).",
        ) from error
