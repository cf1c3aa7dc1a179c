"""A gang of processes with one process group between them, which run functions of the tests together."""

from __future__ import annotations

import faulthandler
import importlib
import os
import socket
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch.multiprocessing as mp
from torch.multiprocessing import Queue

_PATIENCE = 300


class Gang:
    """Processes that stay, since starting one takes seconds: each has imported torch and joined a gloo group.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._tasks: list[Queue[Any]] = [context.Queue() for _ in range(size)]
        self._answers: list[Queue[Any]] = [context.Queue() for _ in range(size)]
        self._members = [
            context.Process(target=_work, args=(i, size, port, self._tasks[i], self._answers[i]), daemon=True)
            for i in range(size)
        ]
        for member in self._members:
            member.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` returns in each process; an exception in one is raised here."""
        found = self.attempt(function, *args)
        for i, (kind, value) in sorted(enumerate(found), key=lambda pair: pair[1][1] is None):
            if kind == "error":
                raise AssertionError(f"in process {i}:\n{value}")
        return [value for _, value in found]

    def attempt(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """("value", what it returned) or ("error", the traceback) of each process."""
        for task in self._tasks:
            task.put((function.__module__, function.__qualname__, args))
        found: list[tuple[str, Any]] = []
        for answer in self._answers:
            try:
                found.append(answer.get(timeout=5 if ("error", None) in found else _PATIENCE))
            except Empty:
                # It waits for one that failed; the error of that one tells more.
                found.append(("error", None))
        return found

    def dismiss(self) -> None:
        """Ends the processes."""
        for task in self._tasks:
            task.put(None)
        for member in self._members:
            member.join(timeout=20)
            if member.is_alive():
                member.kill()


def _work(rank: int, size: int, port: int, tasks: Queue[Any], answers: Queue[Any]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    while (task := tasks.get()) is not None:
        module, name, args = task
        # Who waits for whom, should they wait for each other.
        faulthandler.dump_traceback_later(_PATIENCE - 5)
        try:
            answers.put(("value", getattr(importlib.import_module(module), name)(*args)))
        except BaseException:  # noqa: BLE001
            answers.put(("error", traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
    torch.distributed.destroy_process_group()
