"""Python's search for garbage, kept off a pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unsearched() -> Iterator[None]:
    """Inside, Python does not search for garbage; what nothing refers to is freed all the same.

    A pass makes a few objects for each use of each parameter, and keeps them until its sums are made. After so many
    Python goes through all that there are, torch's and Transformers' hundred thousands too, while a GPU waits.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
