"""What a training goes on with is what its checkpoint was made of: checksums taken before it is written, and after."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp.errors import LedgerError
from hf_dp.per_example.modules import plain_name
from hf_dp.per_example.sharding import reshard
from hf_dp.step.written import plain_optimizer
from hf_dp.training.described import checksum

logger = logging.getLogger(__name__)

# Trainer writes the second beside the first; without it, it reads the weights alone.
OPTIMIZER, SCHEDULE = "optimizer.pt", "scheduler.pt"
_OF, _MOST_NAMED = " of ", 3


def checksums(model: Any, optimizer: Any = None, like: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of what is trained and of the optimizer's state; the same in shards and whole, on every device.

    All ranks call it together; in shards, one tensor at a time is whole.

    Args:
        optimizer: if its state counts.
        like: take those that are named there, in the dtypes that they had.
    """
    reshard(model)
    state = {} if optimizer is None else plain_optimizer(optimizer).state
    found = {}
    for name, p in model.named_parameters():
        name = plain_name(name)
        if p.requires_grad if like is None else name in like:
            dtype = _dtype(like[name]) if like is not None else None
            dtype = dtype or p.dtype
            found[name] = f"{dtype} {_told(p, dtype)}"
            for key, value in sorted(state.get(p, {}).items()):
                if isinstance(value, (Tensor, int, float)):
                    # Optimizers that read a state round it to the parameter, but for the step.
                    found[f"{key}{_OF}{name}"] = _told(value, torch.float32 if key == "step" else dtype)
    return found


def refuse_other_values(
    checkpoint: Path | None, saved: Mapping[str, str] | None, model: nn.Module, optimizer: Any = None
) -> None:
    """Refuses to go on with weights, or a state of the optimizer, that are not those that were saved.

    Args:
        checkpoint: that was read, if any.
        saved: its `checksums`.
        model, optimizer: as loaded; without an optimizer the weights alone are compared.

    Raises:
        LedgerError: with the names of some that differ.
    """
    if checkpoint is None:
        return
    if not saved:
        ranks.warn(logger, "What was loaded from %r could not be compared with what was saved.", str(checkpoint))
        return
    if optimizer is not None:
        _refuse_other_parameters(checkpoint, saved, model)
    if optimizer is not None and not (checkpoint / SCHEDULE).is_file():
        ranks.warn(
            logger,
            "%r has weights alone (save_only_model=True): what the optimizer keeps, such as momentum, begins anew, and "
            "so does the schedule of learning rates, at its first step. The ledger, and the draws, go on.",
            str(checkpoint),
        )
        optimizer = None
    if optimizer is None:
        saved = {name: told for name, told in saved.items() if _OF not in name}
    now = checksums(model, optimizer, saved)
    if others := [name for name, told in saved.items() if now.get(name) != told]:
        some = ", ".join(others[:_MOST_NAMED]) + ", ..." * (len(others) > _MOST_NAMED)
        raise LedgerError(
            f"what was loaded from {str(checkpoint)!r} is not what was saved there: {some} "
            f"({len(others)} of {len(saved)} tensors).",
            why="training would go on from other weights, or with another state of the optimizer, and nothing would "
            "show it.",
            fix="resume with the model, the dtype and the optimizer of the first run, and with newer versions of "
            "accelerate and PEFT, or without FSDP2; to go on from weights that you changed, start a new run from them.",
        )


def _refuse_other_parameters(checkpoint: Path, saved: Mapping[str, str], model: nn.Module) -> None:
    trained = {plain_name(name): p.requires_grad for name, p in model.named_parameters()}
    frozen = [name for name in saved if trained.get(name) is False]
    more = [name for name, is_trained in trained.items() if is_trained and name not in saved]
    for names, now, then in ((frozen, "frozen", "trained"), (more, "trained", "frozen")):
        if names:
            raise LedgerError(
                f"{names[0]} is {now} now, and was {then} when {str(checkpoint)!r} was saved "
                f"({len(names)} of {len(trained)} parameters).",
                why="another training than the one that was saved would go on, and nothing would show it.",
                fix="make the model with the same parameters frozen; to train others from here, load its weights for a "
                "new run with a budget of both: PrivacyConfig(after=...).",
            )


def _told(found: Tensor | float, dtype: torch.dtype) -> str:
    values: Any = found.detach() if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.float64)
    if isinstance(found, DTensor):
        # Shards that are kept in the CPU's memory are sent by the devices.
        values = values.to(found.device_mesh.device_type).full_tensor()
    values = values.to(dtype) if values.is_floating_point() else values
    return " ".join(f"{number:x}" for number in checksum(values))


def _dtype(told: str) -> torch.dtype | None:
    found = getattr(torch, str(told).partition(" ")[0].removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None
