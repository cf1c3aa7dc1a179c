"""Functions that are killed in forks of this process: at each change to the files of a folder, or after a while."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from tqdm import tqdm

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "shutil.copyfile")


def in_a_fork(act: Callable[[], Any]) -> int:
    """How `act` ended in a fork of this process: 0, or the signal that killed it; it may not raise."""
    return ended(forked(act))


def killed_after(acts: list[Callable[[Callable[[str], None]], Any]], seconds: list[float]) -> tuple[bool, list[str]]:
    """Forks that are killed so many seconds after the first of them has said something, or end before.

    Args:
        acts: a fork for each, which gets a function that says something to this process; none may raise but where
            another one was killed.
        seconds: when each is killed, ascending.

    Returns:
        Whether some were killed before they ended, and what was said until then.
    """
    reader, writer = os.pipe()
    children = [forked(lambda act=act: act(lambda text: os.write(writer, f"{text}\n".encode()))) for act in acts]
    os.close(writer)
    said, begin = os.read(reader, 1 << 16), time.monotonic()
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        for child, after in zip(children, seconds, strict=True):
            if child not in statuses and time.monotonic() > begin + after:
                os.kill(child, signal.SIGKILL)
            if child not in statuses and (ended := os.waitpid(child, os.WNOHANG))[0]:
                statuses[child] = ended[1]
        time.sleep(1e-3)
    while more := os.read(reader, 1 << 16):
        said += more
    os.close(reader)
    was_killed = signal.SIGKILL in statuses.values()
    assert was_killed or not any(statuses.values()), statuses
    return was_killed, said.decode().splitlines()


def _with_locks_of_ones_own(bar: type[Any]) -> None:
    """The usual lock of progress bars is shared with forks: who is killed with it is waited for by the others."""
    bar.set_lock(threading.RLock())
    for kind in bar.__subclasses__():
        _with_locks_of_ones_own(kind)


def forked(act: Callable[[], Any]) -> int:
    """The number of a fork of this process that does `act`, which may not raise."""
    _with_locks_of_ones_own(tqdm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which the child never meets
        state, child = random.getstate(), os.fork()
    if child == 0:
        try:
            random.setstate(state)  # a fork seeds it anew
            _with_locks_of_ones_own(tqdm)
            act()
            os._exit(0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
    return child


def ended(child: int) -> int:
    """How a fork ended, which is waited for: 0, or the signal that killed it."""
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
