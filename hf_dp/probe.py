"""For the check before the first step: rows that show what rows can be, and a look at what a forward pass leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.sampling import length

_ROWS = 32
_ROWS_FOR_LENGTHS = 1000
_KEPT = 5


def telling_rows(dataset: Any) -> list[Any]:
    """About five rows from all over `dataset`, of different lengths if a thousand rows show any.

    Only rows of different lengths show whether padding leaks from one into another, and data that is sorted or put
    together from parts often begins with many of one length.
    """
    n = len(dataset)
    rows = [dataset[i] for i in _spread(n, _ROWS)]
    if len({length(row) for row in rows}) == 1 and _is_sequence(rows[0]):
        common = length(rows[0])
        others = (dataset[i] for i in _spread(n, _ROWS_FOR_LENGTHS))
        rows += next(([row] for row in others if length(row) != common), [])
    rows.sort(key=length)
    middle = rows[:: max(1, len(rows) // _KEPT)]
    return middle if length(middle[-1]) == length(rows[-1]) else [*middle, rows[-1]]


def _is_sequence(row: Any) -> bool:
    """Images are all of one size, and a thousand of them take long to read."""
    values = row.values() if isinstance(row, Mapping) else ()
    return length(row) > 0 and not any(getattr(value, "ndim", 1) > 1 for value in values)


def _spread(n: int, count: int) -> list[int]:
    return list(range(n)) if n <= count else [i * (n - 1) // (count - 1) for i in range(count)]


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Refuses a model whose buffers remember what passes through it, such as running averages. They are put back.

    Raises:
        UnsupportedModelError: with the buffer's name.
    """
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        now = dict(model.named_buffers())
        changed = [name for name, (_, value) in before.items() if not _equal(now.get(name), value)]
        for name in changed:
            buffer, value = before[name]
            buffer.detach().copy_(value)
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_buffer(last, buffer)
    if changed:
        raise UnsupportedModelError(
            f"the buffer {changed[0]!r} changes when examples pass through the model.",
            why="buffers are saved with the model, and no noise is added to what this one remembers of the data.",
            fix="switch it off (track_running_stats=False, say), or keep its module in eval mode by its train().",
        )


def _equal(now: Any, before: Tensor) -> bool:
    return (
        isinstance(now, Tensor)
        and now.shape == before.shape
        and bool((now.eq(before) | (now.ne(now) & before.ne(before))).all())
    )
