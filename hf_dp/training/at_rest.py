"""Python's search for garbage, kept off what was there before the first step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def older_objects_at_rest() -> Iterator[None]:
    """Inside, only what has been made inside is searched for garbage.

    A private step makes a few objects for each use of each parameter. After so many of them Python goes through all
    that there are, torch's and Transformers' hundred thousands too, while a GPU waits. Nothing is changed where a
    program has put its objects to rest itself.
    """
    if gc.get_freeze_count():
        yield
        return
    # An earlier trainer that is no longer used holds its model's memory until it is found.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
