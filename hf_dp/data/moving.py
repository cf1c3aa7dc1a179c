"""Batches on their way to where the model is."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import send_to_device


def moved(batch: Any, device: torch.device) -> Any:
    """`batch`, a tensor or a nest of them, on `device`; nobody waits there for what a GPU was given before."""
    return send_to_device(batch, device, non_blocking=device.type == "cuda")
