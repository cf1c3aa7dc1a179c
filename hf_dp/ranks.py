"""The ranks of a run: what they tell each other, over the process group that the launcher made.

Without a process group there is one rank, and nothing is sent. What is secret goes through memory, never a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if _is_initialized() else 1


def rank() -> int:
    """Which of them this is, counted from 0."""
    return dist.get_rank() if _is_initialized() else 0


def sum_(tensor: Tensor) -> None:
    """The sum over all ranks, in place: one all-reduce. Every rank gets the same bits."""
    if world_size() > 1 and tensor.numel():
        carrier = tensor.to(_device()) if tensor.device.type == "cpu" else tensor
        dist.all_reduce(carrier)
        if carrier is not tensor:
            tensor.copy_(carrier)


def from_first_(tensor: Tensor) -> None:
    """Rank 0's values, in place on every rank."""
    if world_size() > 1:
        carrier = tensor.to(_device())
        dist.broadcast(carrier, src=0)
        tensor.copy_(carrier)


def drawn_by_first(draw: Callable[[], Tensor]) -> Tensor:
    """The whole numbers (k,) that rank 0 draws, on every rank; the others draw nothing. Two broadcasts.

    Args:
        draw: called by rank 0 alone; int64, on the CPU. Only the drawing rank knows k.
    """
    if world_size() == 1:
        return draw()
    drawn = draw() if rank() == 0 else torch.empty(0, dtype=torch.int64)
    size = torch.tensor(len(drawn))
    from_first_(size)
    drawn = drawn if rank() == 0 else torch.empty(int(size), dtype=torch.int64)
    if len(drawn):
        from_first_(drawn)
    return drawn


def secret_from_first(secret: bytes) -> bytes:
    """Rank 0's `secret`, on every rank; all give one of the same length."""
    carrier = torch.tensor(list(secret), dtype=torch.uint8)
    from_first_(carrier)
    return bytes(carrier.tolist())


def gathered(numbers: Sequence[float]) -> Tensor:
    """(ranks, len(numbers)) float64, on the CPU: what each rank gave."""
    mine = torch.tensor(list(numbers), dtype=torch.float64)
    if world_size() == 1:
        return mine[None]
    carrier = mine.to(_device())
    rows = [torch.empty_like(carrier) for _ in range(world_size())]
    dist.all_gather(rows, carrier)
    return torch.stack(rows).cpu()


def wait() -> None:
    """Until all ranks have come here."""
    if world_size() > 1:
        gathered([0])


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    """Where the default group's tensors must be: NCCL and its like send from their devices only."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend() in ("gloo", "mpi"):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
