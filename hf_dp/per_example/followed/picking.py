"""Which operations pick rows, turn them round or write some, and where their arguments have the axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dp.per_example.followed.axes import Place, are_even, is_along, is_indexed, is_mask, numbers_of
from hf_dp.per_example.watched import METADATA, flatten, tensors_in

# Asked for what is no number in a tensor.
NO_NUMBERS = METADATA - {Tensor.grad.__get__} | {Tensor._base.__get__}  # type: ignore[union-attr]
INDEXING = frozenset(("__getitem__", "index"))
# Of these each number of the result is one of the first argument's, wherever that is chosen by the others.
CHOOSING = INDEXING.union(
    ("index_select", "gather", "take_along_dim", "narrow", "narrow_copy", "slice", "roll", "flip"),
    ("split", "chunk", "vsplit", "hsplit", "dsplit"),
)
INDEXED_WRITES = frozenset(("__setitem__", "index_put", "index_put_"))
INDEXES = INDEXING | INDEXED_WRITES
CATS, _BELOW = ("cat", "concat", "concatenate"), ("vstack", "row_stack")
JOINING = frozenset((*CATS, *_BELOW))
STACKING = frozenset(("stack", "pad_sequence"))
PIECES = ("split", "chunk", "tensor_split", "split_with_sizes")
# What takes shape and kind from its first argument, and no numbers.
MAKING = frozenset(
    ("new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like")
)
VIEWING = frozenset(("view", "reshape", "unflatten", "view_as", "reshape_as"))
# How the first argument is called, where it is given by name.
_FIRST = ("input", "self", "tensor", "tensors", "sequences")
# Where what picks along one axis has it.
PICKING: dict[str, Place] = {
    **dict.fromkeys(CATS, (1, 0)),
    **dict.fromkeys((*PIECES, "unsafe_chunk", "unsafe_split"), (2, 0)),
    **dict.fromkeys(("narrow", "narrow_copy", "index_select", "gather", "unfold", "slice"), (1, 0)),
    "sort": (1, -1),
    "topk": (2, -1),
    "take_along_dim": (2, None),
    "hsplit": (9, 1),
    "dsplit": (9, 2),
    **dict.fromkeys((*_BELOW, "vsplit"), ()),
    **dict.fromkeys(("masked_select", "take", "msort", "unique", "unique_consecutive", "as_strided"), ()),
}
# The same of what turns rows round, which matters where these are the examples' alone.
TURNING: dict[str, Place] = {"roll": (2, None), "flip": (1, None), "flipud": (), "fliplr": (9, 1)}
# The same of what writes rows into others.
WRITING: dict[str, Place] = {
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce", "slice_scatter"), (1, 0)),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "select_scatter"), (1, 0)),
    **dict.fromkeys(("masked_scatter", "put"), ()),
}
# How the others are called, in order, of which any may be given by name.
_ORDERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("index_select", "gather"), ("dim", "index")),
    **dict.fromkeys(("index_add", "index_copy"), ("dim", "index", "source")),
    **dict.fromkeys(("scatter", "scatter_add"), ("dim", "index", "src")),
    "index_fill": ("dim", "index", "value"),
    "index_put": ("indices", "values", "accumulate"),
    "take_along_dim": ("indices", "dim"),
    "masked_scatter": ("mask", "source"),
    "masked_fill": ("mask", "value"),
    "masked_select": ("mask",),
    "select_scatter": ("src", "dim", "index"),
    "slice_scatter": ("src", "dim", "start", "end", "step"),
    "narrow": ("dim", "start", "length"),
    "mm": ("mat2",),
    "matmul": ("other",),
    "roll": ("shifts", "dims"),
}
MAY_PICK = {*INDEXING, *INDEXED_WRITES, *PICKING, *TURNING, "repeat_interleave"}


def placed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation, those that were given by name in their places, as far as these are known."""
    if not kwargs:
        return args, kwargs
    given = dict(kwargs)
    if not args:
        args = tuple([given.pop(first) for first in _FIRST if first in given][:1])
    for one in _ORDERS.get(name.removesuffix("_"), ())[len(args) - 1 :] if args else ():
        if one not in given:
            break
        args = (*args, given.pop(one))
    return args, given


class Operation(NamedTuple):
    """One that was run, with what it gave."""

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Operation:
        """By its name without what tells its overloads apart."""
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        return Operation(name, func, *placed(name, args, kwargs), output)

    @property
    def source(self) -> Tensor | None:
        """Its first argument, if that is a tensor."""
        first = self.args[0] if self.args else None
        return first if isinstance(first, Tensor) else None

    def axis_at(self, place: int) -> Any:
        """The axis that it is given, by name or in a place; the first where it is given none."""
        found = self.args[place] if len(self.args) > place else 0
        return next((self.kwargs[name] for name in ("dim", "axis") if name in self.kwargs), found)

    @property
    def is_search(self) -> bool:
        """Whether it gives the numbers of some rows of its argument."""
        return self.name in ("nonzero", "argwhere") or (self.name == "where" and len(self.args) + len(self.kwargs) == 1)

    @property
    def join(self) -> tuple[Any, bool]:
        """Along which axis of its result what it joins lies, and whether that axis is new."""
        axes = self.picked_of[0].dim() if self.picked_of else 0
        if self.name == "pad_sequence":
            is_first = self.kwargs.get("batch_first", self.args[1] if len(self.args) > 1 else False)
            return (0 if is_first else 1), True
        # As torch has it: what has no axis, or one, is a row, or a column.
        if self.name in _BELOW:
            return 0, axes < 2
        if self.name in ("hstack", "column_stack"):
            return (0 if axes < 2 and self.name == "hstack" else 1), axes < (2 if self.name == "column_stack" else 1)
        return self.axis_at(1), self.name == "stack"

    @property
    def picked_of(self) -> list[Tensor]:
        """What it picks rows of: all that it joins, or the first of these."""
        return tensors_in(*self.args)

    @property
    def rows_source(self) -> Tensor | None:
        """What it would pick rows of, if it picks any."""
        tensors = self.picked_of
        if not tensors or tensors[0].dim() == 0:
            return None
        # What is joined may begin with nothing (an empty cache), which has one axis.
        return max(tensors, key=Tensor.dim) if self.name in JOINING else tensors[0]

    def picks(self, source: Tensor, axis: int, is_data: Callable[[Tensor], bool], is_turned: bool) -> bool:
        """Whether it picks rows of its `source` along an axis, or writes some; what turns rows round if `is_turned`."""
        name, args, kwargs = self.name, self.args, self.kwargs
        if name in INDEXES:
            index = args[1] if name.startswith("__") else tuple(slice(None) if i is None else i for i in args[1])
            # What looks up rows of a table has as many as it was given numbers of rows.
            is_lookup = not self.is_written and not is_data(source) and not any(map(is_mask, flatten(index)))
            return not is_lookup and is_indexed(source, index, axis)
        if name == "repeat_interleave":
            is_uneven = any(isinstance(a, Tensor) and a.numel() > 1 for a in (*args[1:], *kwargs.values()))
            return is_uneven and (not axis or is_along((2, None), args, kwargs, source, axis))
        if (place := WRITING.get(name.removesuffix("_"))) is not None:
            return is_along(place, args, kwargs, source, axis)
        if name in TURNING and is_turned:
            args = (source, args[1:]) if name == "flip" and len(args) > 2 else args
            return is_data(source) and is_along(TURNING[name], args, kwargs, source, axis)
        place = PICKING.get(name)
        is_of_data = place is not None and any(map(is_data, self.picked_of if name in JOINING else [source]))
        return place is not None and is_of_data and is_along(place, args, kwargs, source, axis)

    @property
    def is_written(self) -> bool:
        """Whether it writes rows into its first argument, or a copy of that."""
        return self.name in INDEXED_WRITES or self.name.removesuffix("_") in WRITING

    @property
    def numbers_of_each(self) -> Tensor | None:
        """The numbers of rows in `x[rows, ...]`, something of each of which is taken."""
        parts = self.args[1] if self.name == "__getitem__" else ()
        if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], Tensor):
            return None
        are_rows = all(part.dim() == 1 and not is_mask(part) for part in tensors_in(parts))
        others = all(isinstance(part, (Tensor, int, slice)) and not isinstance(part, bool) for part in parts)
        return parts[0] if are_rows and others else None

    @property
    def is_in_place(self) -> bool:
        """Whether it changes its first argument."""
        return self.name == "__setitem__" or (self.is_written and self.name.endswith("_"))

    def on(self, numbers: Tensor) -> list[Tensor]:
        """What it gives of these in place of its first argument."""
        return flatten(self.func(numbers, *self.args[1:], **self.kwargs))

    def picks_one_of_each(self, size: int) -> bool:
        """Whether what is picked of its first argument is one of each of so many examples, in order."""
        source = self.source
        assert source is not None
        first = torch.arange(size, device=source.device)[:, None]
        # Of sequences (T, B, ...) the examples are second.
        for axis in [0] * (len(source) % size == 0) + [1] * (source.shape[1:2] == (size,)):
            found = self.on(numbers_of(source, axis, size))
            if all(bool((one.reshape(size, -1) == first).all()) for one in found):
                return True
        return False

    def is_even(self, size: int) -> bool:
        """Whether the rows that an index picks, of as many of each of so many examples, are as many of each again."""
        if self.source is None or len(self.source) % size or self.kwargs:
            return False
        parts = self.args[1] if self.name == "__getitem__" and isinstance(self.args[1], tuple) else self.args[-1:]
        are_tensors = all(isinstance(part, Tensor) for part in parts)
        return self.name in ("__getitem__", "index_select") and are_tensors and are_even(self.source, parts, size)

    def found_one_of_each(self, size: int) -> list[bool]:
        """Whether rows that were searched for are one of each of so many examples, in order; nothing of others."""
        source, several = self.source, tensors_in(self.output)
        if not self.is_search or source is None or not source.dim() or len(source) % size or len(several[0]) != size:
            return []
        first = several[0] if several[0].dim() == 1 else several[0][:, 0]
        return [torch.equal(first // (len(source) // size), torch.arange(size, device=first.device))]

    def as_of_rows(self) -> Operation:
        """A lookup in rows that were computed from the batch is a pick of them."""
        table, ids = sorted(tensors_in(self.args, self.kwargs), key=lambda one: not one.is_floating_point())[:2]
        return Operation("__getitem__", Tensor.__getitem__, (table, ids), {}, self.output)
