"""For the check before the first step: rows that show what rows can be, and a look at what a forward pass leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor, nn

from hf_dp.errors import ConfigurationError, HfDpError, UnsupportedModelError
from hf_dp.sampling import length

_ROWS = 32
_ROWS_FOR_LENGTHS = 1000
_KEPT = 5
# Long texts and images take much memory; with indices of rows, more at a time is slower.
_AT_ONCE = 1000
_NO_LABEL = -100


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


def extreme_rows(dataset: Any) -> list[int]:
    """Of each column of whole numbers, rows with the longest and shortest list, the least and largest number, and none.

    An id beyond the vocabulary, a label that is no class or is missing, a text without tokens, and one with more tokens
    than positions are among them.
    Only a `datasets.Dataset` without a transform knows its columns; of others, which would be read row by row, none.
    """
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return []
    names = [field.name for field in dataset.features.arrow_schema if pa.types.is_integer(_innermost(field.type))]
    found: dict[tuple[str, str], tuple[int, int]] = {}
    begin = 0
    # Without columns there would be no rows to go through.
    for table in dataset.with_format("arrow", columns=names).iter(_AT_ONCE) if names else ():
        for name in names:
            for what, value, row in _extremes(table[name].combine_chunks()):
                found[name, what] = max(found.get((name, what), (value, begin + row)), (value, begin + row))
        begin += len(table)
    return sorted({row for _, row in found.values()})


def _innermost(kind: pa.DataType) -> pa.DataType:
    return _innermost(kind.value_type) if _is_list(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _extremes(column: pa.Array) -> Iterator[tuple[str, int, int]]:
    """What, how much of it, and in which row; the more, the more extreme."""
    rows, depth = np.arange(len(column)), 0
    while _is_list(column.type):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        if len(lengths):
            yield f"longest, {depth}", int(lengths.max()), int(rows[lengths.argmax()])
            yield f"shortest, {depth}", -int(lengths.min()), int(rows[lengths.argmin()])
        rows = rows[pc.list_parent_indices(column).to_numpy(zero_copy_only=False)]
        column, depth = pc.list_flatten(column), depth + 1
    is_number = column.is_valid().to_numpy(zero_copy_only=False)
    if column.null_count:
        yield "missing", 1, int(rows[is_number.argmin()])
    values, rows = column.drop_null().to_numpy(zero_copy_only=False), rows[is_number]
    is_told = values != _NO_LABEL
    values, rows = values[is_told], rows[is_told]
    if len(values):
        yield "smallest", -int(values.min()), int(rows[values.argmin()])
        yield "largest", int(values.max()), int(rows[values.argmax()])


def refuse_rows_that_fail(dataset: Any, extremes: list[int], few: list[Any], run: Callable[[Any], object]) -> None:
    """Refuses training data of which some row would stop the training, after it has spent budget.

    Args:
        dataset: of which the `extremes` are tried.
        extremes: see `extreme_rows`.
        few: rows that are tried as well; see `telling_rows`.
        run: takes one row through the collator and the model, to its loss.

    Raises:
        ConfigurationError: with the error that the row made.
    """
    tried = [(f"row {i} of the training data", dataset[i]) for i in extremes]
    for name, row in [*tried, *(("a row of the training data", row) for row in few)]:
        try:
            loss = run(row)
            if isinstance(loss, Tensor):
                # An accelerator tells of an index out of range only when it is asked for a number.
                loss.sum().item()
        except (HfDpError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ConfigurationError(
                f"{name} does not go through the collator and the model ({type(error).__name__}: {error}).",
                why="the training would stop where it is drawn, and what was spent until then would be lost.",
                fix="correct the row or leave it out: token ids are below the size of the vocabulary, labels are below "
                "num_labels, and texts have no more tokens than the model has positions (truncation=True). If any row "
                "fails, the collator, model or adapter does not take one by itself; micro-batches of one occur.",
            ) from error


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Refuses a model whose buffers remember what passes through it, such as running averages. They are put back.

    Raises:
        UnsupportedModelError: with the buffer's name.
    """
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    try:
        yield
    except BaseException:
        # An accelerator that had an index out of range answers nothing any more, which must not hide the reason.
        with suppress(torch.AcceleratorError):
            _put_back(model, before)
        raise
    changed = _put_back(model, before)
    if changed:
        raise UnsupportedModelError(
            f"the buffer {changed[0]!r} changes when examples pass through the model.",
            why="buffers are saved with the model, and no noise is added to what this one remembers of the data.",
            fix="switch it off (track_running_stats=False, say), or keep its module in eval mode by its train().",
        )


def _put_back(model: nn.Module, before: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
    """The names of the buffers that are not what they were before, and now are again."""
    now = dict(model.named_buffers())
    changed = [name for name, (_, value) in before.items() if not _equal(now.get(name), value)]
    for name in changed:
        buffer, value = before[name]
        buffer.detach().copy_(value)
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner).register_buffer(last, buffer)
    return changed


def _equal(now: Any, before: Tensor) -> bool:
    return (
        isinstance(now, Tensor)
        and now.shape == before.shape
        and bool((now.eq(before) | (now.ne(now) & before.ne(before))).all())
    )
