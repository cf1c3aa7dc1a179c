"""Where a number that is read has to be waited for."""

from __future__ import annotations

import torch

_AT_ONCE = frozenset({"cpu"})


def answers_at_once(device: torch.device) -> bool:
    """Whether numbers there are read without waiting for all that was asked of the device before.

    Elsewhere nothing is read between the micro-batches of a step: the device would fall idle until it is asked again.
    """
    return device.type in _AT_ONCE
