"""Which operations pick rows along the first axis, and which write some: which rows these are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dp.per_example.followed.axes import is_mask
from hf_dp.per_example.followed.picking import JOINING, PIECES, STACKING, Operation

# What may say how many rows of a kind each example has.
NUMBERING = ("sum", "count_nonzero")
REPEATING = ("repeat_interleave", "repeat")
_ADDING = ("index_add", "scatter_add", "scatter_reduce")


class Pick(NamedTuple):
    """Rows that are picked.

    Attributes:
        rows: what picks their owners as well.
        are_numbers: whether these are numbers that were computed.
    """

    rows: Any
    are_numbers: bool


class Write(NamedTuple):
    """Rows that are written.

    Attributes:
        rows: what picks their owners.
        value: what is written, one row after another; None if it is a number.
        is_partial: whether something is left of what was there.
        times: how often each owner comes in `rows`.
        is_one: whether all of the value is one row.
    """

    rows: Any
    value: Tensor | None
    is_partial: bool
    times: int = 1
    is_one: bool = False


def name_of(func: Any) -> str:
    """Of a torch function."""
    return str(getattr(func, "__name__", ""))


def may_pick_or_write(name: str) -> bool:
    """Whether an operation of this name may have to do with rows of which nothing is known."""
    return name in _NAMES or is_write(name)


def is_write(name: str) -> bool:
    """Whether an operation of this name may write rows."""
    return name in _WRITING or name.removesuffix("_") in _WRITING


def picked(op: Operation) -> Pick | None:
    """The rows that an operation picks, all else being left as it is; None where it picks none that are known."""
    if op.name == "index_select":
        index = op.kwargs.get("index", op.args[-1])
        return Pick(index, True) if op.axis_at(1) == 0 and _are_numbers(index, or_is=True) else None
    return _of_index(op.args[1])[0] or _of_column(op.args[1]) if op.name == "__getitem__" else None


def written(op: Operation) -> Write | None:
    """The rows that an operation writes along the first axis."""
    args, kwargs = op.args, op.kwargs
    name = op.name.removesuffix("_") if not op.name.startswith("__") else op.name
    if name not in _WRITING or kwargs.keys() - {"accumulate", "alpha", "reduce", "include_self"}:
        return None
    if name in ("__setitem__", "index_put") and len(args) > 2:
        value = args[2] if isinstance(args[2], Tensor) else None
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if isinstance(first, int) and not isinstance(first, bool):
            return Write(slice(first, first + 1 or None), value, True, is_one=True)
        pick, is_whole = _of_index(tuple(args[1]) if name == "index_put" else args[1])
        if pick is None:
            return Write(slice(None), value, True) if keeps_first(args[1], args[0].dim()) else None
        is_added = bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
        return Write(pick.rows, value, is_added or not is_whole)
    if name == "masked_scatter" and len(args) == 3 and len(args[2]):
        places = args[1].expand(args[0].shape).nonzero()[:, 0]
        return Write(places, args[2], True, args[2].numel() // len(args[2]))
    if len(args) < 4 or args[1] != 0 or not isinstance(args[3], Tensor):
        return None
    index = args[2]
    if name.startswith("index") and _are_numbers(index, or_is=True):
        index = index.reshape(-1)
    if name.startswith("scatter"):  # a column of numbers, laid out over the features
        if any(index.stride()[1:]) or index.shape != args[3].shape:
            return None
        index = index[(slice(None), *[0] * (index.dim() - 1))]
    return Write(index, args[3], name in _ADDING or "reduce" in kwargs) if _are_numbers(index) else None


def keeps_first(index: Any, dimensions: int) -> bool:
    """Whether an index leaves the first axis as it is."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not (part is None or part is Ellipsis or isinstance(part, (slice, int))) for part in parts):
        return False
    if parts[:1] == [slice(None)]:
        return True
    return parts[:1] == [Ellipsis] and sum(part is not None for part in parts[1:]) < dimensions


def _of_index(index: Any) -> tuple[Pick | None, bool]:
    """What an index picks, and whether it picks whole rows."""
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    is_under_one = first is None and bool(rest)
    if is_under_one:  # (1, n, ...)
        first, *rest = rest
    if isinstance(first, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in first):
        first = torch.tensor(first)
    tensors = [part for part in rest if isinstance(part, Tensor)]
    is_whole = all(part is Ellipsis or part == slice(None) for part in rest if not isinstance(part, Tensor))
    if isinstance(first, slice):
        is_pick = first != slice(None) and not tensors and not is_under_one
        return (Pick(first, False) if is_pick else None), is_whole
    if is_mask(first):
        is_pick = first.dim() > 0 and not tensors
        return (Pick(first.nonzero()[:, 0], False) if is_pick else None), is_whole and first.dim() == 1
    beside = all(_are_numbers(part) and part.shape == first.shape for part in tensors) if _are_numbers(first) else False
    if not beside or (is_under_one and tensors):
        return None, False
    return Pick(first, True), is_whole and not tensors


def _of_column(index: Any) -> Pick | None:
    """What is picked by a column of numbers of rows, (n, 1, ...), and others that are the same for all of them."""
    first, *rest = index if isinstance(index, tuple) and index else (None,)
    if not all(isinstance(one, Tensor) and one.dtype in (torch.int32, torch.int64) for one in (first, *rest)):
        return None
    if first.dim() < 2 or first.numel() != len(first):
        return None
    return Pick(first, True) if all(one.dim() == first.dim() and len(one) == 1 for one in rest) else None


def _are_numbers(index: Any, or_is: bool = False) -> bool:
    """Whether it holds numbers of rows, one after another, or is one number by itself."""
    are_rows = isinstance(index, Tensor) and (index.dim() == 1 or (or_is and not index.dim()))
    return are_rows and index.dtype in (torch.int32, torch.int64)


_WRITING = (*_ADDING, "index_copy", "index_put", "masked_scatter", "scatter", "__setitem__")
_FINDING = ("nonzero", "argwhere", "where")
_NAMES = {*JOINING, *STACKING, *PIECES, *_FINDING, *NUMBERING, *REPEATING, "__getitem__", "index_select"}
