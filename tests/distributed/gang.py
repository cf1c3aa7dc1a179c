"""A gang of processes with one process group between them, which run functions of the tests together."""

from __future__ import annotations

import faulthandler
import importlib
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.multiprocessing as mp
from torch.multiprocessing import Queue

# Set in processes that have a GPU of their own.
ON_GPU = "HF_DP_TESTS_ON_GPU"
_PATIENCE = 300


class Gang:
    """Processes that stay, since starting one takes seconds: each has imported torch and joined a group.

    Args:
        size: how many.
        backend: "gloo" on the CPU, or "nccl" with a GPU for each.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.backend = backend
        self._single: Gang | None = None
        self._known: dict[Any, Any] = {}
        # Those without a GPU are forked from one process that has imported everything.
        context = mp.get_context("spawn" if backend == "nccl" else "forkserver")
        if backend != "nccl":
            context.set_forkserver_preload(["tests.distributed.preloaded"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._tasks: list[Queue[Any]] = [context.Queue() for _ in range(size)]
        self._answers: list[Queue[Any]] = [context.Queue() for _ in range(size)]
        # Where they tell each other what the check before the first step has found: it is the same for all.
        self._found = TemporaryDirectory()
        shared = size, port, backend, Path(self._found.name)
        self._members = [
            context.Process(target=_work, args=(i, *shared, self._tasks[i], self._answers[i]), daemon=True)
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

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """What it returns in one process without a group, on the same kind of device."""
        if self.backend == "gloo":
            return function(*args)
        self._single = self._single or Gang(1, self.backend)
        return self._single.run(function, *args)[0]

    def alone_once(self, function: Callable[..., Any], *args: Any) -> Any:
        """As `alone`, computed once: of functions that give the same for the same arguments, and leave nothing."""
        if (asked := (function, args)) not in self._known:
            self._known[asked] = self.alone(function, *args)
        return self._known[asked]

    def attempt(self, function: Callable[..., Any], *args: Any) -> list[tuple[str, Any]]:
        """("value", what it returned) or ("error", the traceback) of each process."""
        for task in self._tasks:
            task.put((function.__module__, function.__qualname__, args))
        found: list[tuple[str, Any]] = []
        for answer, member in zip(self._answers, self._members, strict=True):
            until = time.monotonic() + (20 if any(kind == "error" for kind, _ in found) else _PATIENCE)
            while True:
                try:
                    found.append(answer.get(timeout=1))
                    break
                except Empty:
                    # It is dead, or waits for one that failed, whose error tells more.
                    if time.monotonic() > until or not member.is_alive():
                        found.append(("error", None))
                        break
        return found

    def dismiss(self) -> None:
        """Ends the processes."""
        if self._single is not None:
            self._single.dismiss()
        for task in self._tasks:
            task.put(None)
        for member in self._members:
            member.join(timeout=20)
            if member.is_alive():
                member.kill()
        self._found.cleanup()


def _work(rank: int, size: int, port: int, backend: str, found: Path, tasks: Queue[Any], answers: Queue[Any]) -> None:
    import torch

    # What was forked would begin with the same numbers everywhere.
    random.seed()
    np.random.seed()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    on_gpu = backend == "nccl"
    os.environ |= {ON_GPU: "yes"} if on_gpu else {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    if on_gpu and size == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    elif on_gpu:
        torch.cuda.set_device(rank)
    if on_gpu:
        # Of convolutions; matrix products have it off.
        torch.backends.cudnn.allow_tf32 = False
    if size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        torch.distributed.init_process_group(backend, rank=rank, world_size=size)
    from tests import certified

    certified.shared = found
    with certified.once():
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
    if size > 1:
        torch.distributed.destroy_process_group()
