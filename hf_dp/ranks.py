"""The ranks of a run: what they tell each other, over the process group that the launcher made.

Without a process group there is one rank, and nothing is sent. What is secret goes through memory, never a file.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.utils.tqdm import tqdm
from torch import Tensor

from hf_dp.errors import RanksError
from hf_dp.launched import of_the_backend

# Seconds in which a rank that failed has said why.
_PATIENCE = 5.0
# Seconds in which other ranks come where this one is, if they are not at work on something else.
_SILENCE = 60.0
_LONGEST_REASON = 2000


def in_group() -> bool:
    """Whether there is a process group, of one rank or several."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if in_group() else 1


def rank() -> int:
    """Which of them this is, counted from 0."""
    return dist.get_rank() if in_group() else 0


def warn(logger: logging.Logger, message: str, *args: object) -> None:
    """A warning of the whole run: said by rank 0, above a progress bar if there is one."""
    if rank() == 0:
        _above_the_bar(logger, message, *args)


def _above_the_bar(logger: logging.Logger, message: str, *args: object) -> None:
    with tqdm.external_write_mode(sys.stderr):
        logger.warning(message, *args)


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


def text_from_first(text: str) -> str:
    """Rank 0's text, on every rank. Two broadcasts."""
    sent = drawn_by_first(lambda: torch.tensor(list(text.encode()), dtype=torch.int64))
    return bytes(sent.tolist()).decode()


def gathered(numbers: Sequence[float]) -> Tensor:
    """(ranks, len(numbers)) float64, on the CPU: what each rank gave."""
    mine = torch.tensor(list(numbers), dtype=torch.float64)
    if world_size() == 1:
        return mine[None]
    carrier = mine.to(_device())
    rows = [torch.empty_like(carrier) for _ in range(world_size())]
    dist.all_gather(rows, carrier)
    return torch.stack(rows).cpu()


def most(number: int) -> int:
    """The largest of the ranks' numbers. One small all-gather."""
    return int(gathered([number]).max())


@contextmanager
def together() -> Iterator[None]:
    """What all ranks do together: of one that fails the others learn why, once the backend tells them that it is gone.

    Raises:
        RanksError: in place of the backend's error, with the reason of the rank that failed.
    """
    store, me = _store(), rank()
    if store is None:
        yield
        return
    reasons = f"hf_dp/reasons {store.add(f'hf_dp/attempts of rank {me}', 1)}"
    try:
        yield
    except BaseException as error:
        is_echo = of_the_backend(error)
        # The store may have gone with rank 0.
        with suppress(RuntimeError):
            store.set(f"{reasons} of rank {me}", "" if is_echo else _reason(error))
        if is_echo:
            raise _lost(error, _reasons(store, reasons)) from error
        raise


@contextmanager
def before_together() -> Iterator[None]:
    """What a rank does before it meets the others in `together`, where they learn why it did not come."""
    try:
        yield
    except BaseException as error:
        if (store := _store()) is not None:
            with suppress(RuntimeError):
                # The one in which the others wait for it.
                attempt = store.add(f"hf_dp/attempts of rank {rank()}", 1)
                said = "" if of_the_backend(error) else _reason(error)
                store.set(f"hf_dp/reasons {attempt} of rank {rank()}", said)
        raise


def _store() -> Any:
    """What ranks write to each other beside the collectives; None for a single one, and under MPI, which has none."""
    return dist.distributed_c10d._get_default_store() if world_size() > 1 else None


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]


def _reasons(store: Any, name: str) -> dict[int, str]:
    """What each other rank gave as its reason, "" if it waited too; those that say nothing are missing."""
    given: dict[int, str] = {}
    end = time.monotonic() + _PATIENCE
    with suppress(RuntimeError):
        while time.monotonic() < end and len(given) < world_size() - 1 and not any(given.values()):
            for other in {*range(world_size())} - {rank(), *given}:
                if store.check([f"{name} of rank {other}"]):
                    given[other] = store.get(f"{name} of rank {other}").decode()
            time.sleep(0.1)
    return given


def _lost(error: BaseException, given: dict[int, str]) -> RanksError:
    silent = ", ".join(str(other) for other in range(world_size()) if other != rank() and other not in given)
    failed = [f"rank {other} stopped: {reason}" for other, reason in sorted(given.items()) if reason]
    found = "; ".join(failed) or (
        f"rank {silent} ended without a word (killed, for want of memory perhaps, or at the end of its script)"
        if silent
        else f"what the ranks send each other did not arrive: {error}"
    )
    return RanksError(
        f"{found}\n  This is rank {rank()}, which waited for it.",
        why="every step is one sum over all ranks.",
        fix="look at the output of that rank, remove the cause, and resume from the last checkpoint.",
    )


def warn_of_missing(logger: logging.Logger, call: str) -> None:
    """Before ranks wait for each other in a call that all must make: says after a while which have not made it.

    It then returns, and what waits is the backend, as long as its own time limit.
    """
    store = dist.distributed_c10d._get_default_store() if world_size() > 1 else None
    if store is None:  # MPI has none
        return
    name = f"hf_dp/calls of {call} by rank"
    mine, end = store.add(f"{name} {rank()}", 1), time.monotonic() + _SILENCE
    missing = [other for other in range(world_size()) if other != rank()]
    while missing := [other for other in missing if store.add(f"{name} {other}", 0) < mine]:
        if time.monotonic() > end:
            said = "Rank %d waits in %s for rank %s: every rank must call it, not the first alone."
            _above_the_bar(logger, said, rank(), call, ", ".join(map(str, missing)))
            return
        time.sleep(0.05)


def wait() -> None:
    """Until all ranks have come here."""
    if world_size() > 1:
        gathered([0])


def _device() -> torch.device:
    """Where the default group's tensors must be: NCCL and its like send from their devices only."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend() in ("gloo", "mpi"):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
