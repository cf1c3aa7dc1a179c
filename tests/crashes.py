"""A function that is killed at each change that it makes to the files of a folder, in forks of this process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "shutil.copyfile")


def in_a_fork(act: Callable[[], Any]) -> int:
    """How `act` ended in a fork of this process: 0, or the signal that killed it; it may not raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which the child never meets
        state, child = random.getstate(), os.fork()
    if child == 0:
        try:
            random.setstate(state)  # a fork seeds it anew
            act()
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status


def killed(folder: Path, act: Callable[[], Any], number: int) -> bool:
    """Whether `act`, in a fork, came to its change `number` (from 1) to a file in `folder`; it is killed before it."""

    def hooked() -> None:
        sys.addaudithook(_kill_at(str(folder), number))
        act()

    return in_a_fork(hooked) != 0


def killed_everywhere(folder: Path, act: Callable[[], Any]) -> Iterator[None]:
    """Yields after each kill, with `folder` as it was left; then puts back what was there. At last, after none."""
    before, number = folder.with_name(folder.name + "-before"), 0
    shutil.copytree(folder, before, symlinks=True)
    while True:
        number += 1
        was_killed = killed(folder, act, number)
        yield
        if not was_killed:
            return
        shutil.rmtree(folder)
        shutil.copytree(before, folder, symlinks=True)


def digests(folder: Path) -> dict[str, str]:
    """Of every file in `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


def _kill_at(folder: str, number: int) -> Callable[[str, tuple[Any, ...]], None]:
    left = [number]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
        if not (writes or event in _CHANGES) or not str(arguments[0]).startswith(folder):
            return
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook
