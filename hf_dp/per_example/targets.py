"""Targets of CTC, held to be classes: torch looks up whatever lies where others would be, and writes there.

That is numbers of the example beside it, or no memory of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def targets_in_range() -> Iterator[None]:
    """Inside, `torch.ctc_loss`, which those of `torch.nn` call, raises an IndexError of targets that are no classes."""
    inner = torch.ctc_loss

    @functools.wraps(inner)
    def looking(
        log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        _refuse_beyond(targets, target_lengths, log_probs.shape[-1])
        return inner(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)

    torch.ctc_loss = looking
    try:
        yield
    finally:
        torch.ctc_loss = inner


def _refuse_beyond(targets: Tensor, target_lengths: Any, classes: int) -> None:
    lengths = torch.as_tensor(target_lengths, device=targets.device)
    if targets.dim() == 2:
        # What lengths do not fit torch refuses by itself.
        if lengths.shape != targets.shape[:1]:
            return
        meant = targets[torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]]
    else:
        meant = targets[: int(lengths.sum())]
    beyond = meant[(meant < 0) | (meant >= classes)]
    if beyond.numel():
        raise IndexError(
            f"Target {int(beyond[0])} is out of bounds: targets of ctc_loss are classes from 0 to {classes - 1}, and "
            "labels below 0 no targets (leave them out, or let target_lengths not count them)."
        )
