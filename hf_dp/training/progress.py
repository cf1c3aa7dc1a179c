"""What a training shows of itself on a terminal: that its check goes on, pass by pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils.tqdm import tqdm
from torch import nn

import hf_dp.ranks as ranks


@contextmanager
def passes_shown(model: nn.Module, *, is_silent: bool) -> Iterator[None]:
    """Inside, a line counts the forward passes of `model`, by rank 0, where there is a terminal; then it goes."""
    # None: only where there is a terminal.
    hidden = True if is_silent or ranks.rank() else None
    shown = tqdm(desc="Checking before the first step", unit=" passes", leave=False, disable=hidden)  # type: ignore[no-untyped-call]
    with shown as line:

        def count(*_: Any) -> None:
            line.update()

        handle = model.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()
