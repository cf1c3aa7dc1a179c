"""How an error that ends one process of many is seen: once, and last in what the launcher prints. No torch."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hf_dp.errors import HfDpError, RanksError

# torchrun, and accelerate through it, print what stands in this file after all else.
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# Seconds in which one process that has failed is gone, and a launcher has ended the others.
_TURN = 15.0
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def is_one_of_many() -> bool:
    """Whether a launcher started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def is_first() -> bool:
    """Whether this is rank 0, or alone."""
    return not is_one_of_many() or os.environ.get("RANK", "0") == "0"


def asked_for_more() -> bool:
    """Whether `accelerate launch` was asked for several processes, or machines, and started this one alone.

    With --cpu it does, if it is not told an MPI. It says where the others would meet, and not how many there are.
    """
    return not is_one_of_many() and {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= os.environ.keys()


@functools.cache
def say_once() -> None:
    """From now on an error that ends this process is seen once, if it is one of many.

    All ranks mostly raise the same, and a rank that waits for one that has failed knows less than that one. So these
    wait until the launcher ends them, and speak where it does not.
    """
    if is_one_of_many():
        sys.excepthook = functools.partial(_last_words, sys.excepthook)


def hand_over(error: BaseException) -> bool:
    """Waits for this process's turn; whether the launcher will then print the error, as the last that it prints."""
    if not is_one_of_many():
        return False
    if not is_first() or isinstance(error, RanksError) or of_the_backend(error):
        time.sleep(_TURN)
    if _ERROR_FILE not in os.environ:
        return False
    words = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        with open(os.environ[_ERROR_FILE], "w", encoding="utf-8") as file:
            json.dump({"message": words}, file)
    except OSError:
        return False
    return True


def of_the_backend(error: BaseException) -> bool:
    """Whether gloo or NCCL says that another process is not there, which torch makes a RuntimeError of."""
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "Gloo", "NCCL"))


def _last_words(inner: _Hook, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    is_handed_over = isinstance(error, Exception) and hand_over(error)
    # Of a refusal the words are enough.
    if not (is_handed_over and isinstance(error, HfDpError)):
        inner(kind, error, traceback)
