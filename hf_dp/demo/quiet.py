"""What libraries say, and how many threads they take, while something else is told."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import datasets
import torch
import transformers

from hf_dp.training import progress


@contextmanager
def quiet(*, begins: bool = False) -> Iterator[None]:
    """Keeps the libraries' own messages and bars out of the story; all settings are restored.

    Args:
        begins: what a private training says as it begins is a part of it.
    """
    # hf_dp's say what a run promises; here the table does.
    wanted = dict.fromkeys(("hf_dp", "transformers", "datasets"), logging.ERROR)
    if begins:
        wanted[progress.__name__] = logging.WARNING
    logs = [logging.getLogger(name) for name in wanted]
    levels = [log.level for log in logs]
    bars = transformers.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    for log, level in zip(logs, wanted.values(), strict=True):
        log.setLevel(level)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # from one library to another
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        if bars[0]:
            transformers.logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small gain little from a second thread, and lose much when it has to share its core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
