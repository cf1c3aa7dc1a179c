"""Whether a model picks rows: then how many of them are an example's follows from the data, and not from a shape.

Of B k rows each example has k where all that was done to a batch keeps every row: views, copies, and what works on one
row. In which order they lie preflight compares with the oracle: it is the same for all data. An operation that picks
rows along a first axis, or puts them elsewhere, ends that. Not all that do are known by name: numbers of rows are held
against those of positions besides (`reading.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.watched import METADATA, WatchedParameter, flatten, tensors_in

_INDEXING = frozenset(("__getitem__", "index"))
# Of these each number of the result is one of the first argument's, wherever that is chosen by the others.
_CHOOSING = _INDEXING | {
    "index_select",
    "gather",
    "take_along_dim",
    "narrow",
    "narrow_copy",
    "slice",
    "split",
    "chunk",
    "vsplit",
}
_INDEXED_WRITES = frozenset(("__setitem__", "index_put", "index_put_"))
_JOINING = frozenset(("cat", "concat", "concatenate", "vstack", "row_stack"))
_VIEWING = frozenset(("view", "reshape", "unflatten", "view_as", "reshape_as"))
# How the first argument is called, where it is given by name.
_FIRST = ("input", "self", "tensor", "tensors", "sequences")
# Where the arguments of what picks along one axis have that axis, and which it is where they leave it out; () of what
# knows no axis.
_PICKING: dict[str, tuple[int, int | None] | tuple[()]] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), (1, 0)),
    **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "chunk", "unsafe_chunk", "unsafe_split"), (2, 0)),
    **dict.fromkeys(("narrow", "narrow_copy", "index_select", "gather", "unfold", "slice"), (1, 0)),
    "sort": (1, -1),
    "topk": (2, -1),
    "take_along_dim": (2, None),
    **dict.fromkeys(("vstack", "row_stack", "vsplit"), ()),
    **dict.fromkeys(("masked_select", "take", "msort", "unique", "unique_consecutive", "as_strided"), ()),
}
# The same of what writes rows into others.
_WRITING: dict[str, tuple[int, int | None] | tuple[()]] = {
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce", "slice_scatter"), (1, 0)),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "select_scatter"), (1, 0)),
    **dict.fromkeys(("masked_scatter", "put"), ()),
}
_OF_NO_NUMBERS = METADATA - {Tensor.grad.__get__}  # type: ignore[union-attr]


class Picked(TorchFunctionMode):
    """Follows the data of one forward pass.

    Args:
        batch: its tensors.
        batch_size: B.
        images: for how many there is room in the batch, where an example may have several: what becomes of those that
            are not there is asked elsewhere.
    """

    def __init__(self, batch: Iterable[Tensor], batch_size: int, images: int = 0) -> None:
        super().__init__()
        self._data: Any = WeakIdKeyDictionary()
        self._data.update((tensor, None) for tensor in batch)
        # What follows from rows that were picked, by which operation; and of B rows whether row i was of example i.
        self._picked: Any = WeakIdKeyDictionary()
        self._one_of_each: Any = WeakIdKeyDictionary()
        # Of other numbers of rows, as they were picked, whether they are as many of each, in order.
        self._are_even: Any = WeakIdKeyDictionary()
        # What follows from rows that were picked, be they as many of each or not; and whose those of pieces are.
        self._indexed: Any = WeakIdKeyDictionary()
        self._owners: Any = WeakIdKeyDictionary()
        # Of what the operation at hand was given, for what is computed on the way to its result.
        self._within: tuple[str | None, bool | None] = None, None
        self._batch_size, self._images = batch_size, images

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Most that it is asked for is a tensor's shape and the like, and what follows would ask for some itself.
        if func in _OF_NO_NUMBERS:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        given = tensors_in(args, kwargs)
        with torch._C.DisableTorchFunction():
            known = [self._one_of_each[a] for a in given if a in self._one_of_each] if len(self._one_of_each) else []
            by = next((self._picked[a] for a in given if a in self._picked), None) if len(self._picked) else None
        before, self._within = self._within, (by, all(known) if known else None)
        try:
            output = func(*args, **kwargs)
        finally:
            self._within = before
        with torch._C.DisableTorchFunction():
            if any(map(self.is_data, given)):
                self._follow(func, args, kwargs, given, output, known, by)
        return output

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        output: Any,
        known: list[bool],
        by: str | None,
    ) -> None:
        """Notes what becomes of data, from what was known of what was `given`."""
        made = tensors_in(output)
        self._data.update((one, None) for one in made)
        # Masks hide, and are no rows: those of attention are looked up by rows in every model.
        rows = [one for one in made if one.dtype != torch.bool]
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        table = next((a for a in given if a.is_floating_point()), None)
        if name == "embedding" and table is not None and self.is_data(table) and {a.dim() for a in given} == {1, 2}:
            # Rows that were computed from the batch, looked up as those of a table.
            index = given[given[0] is table]
            name, func, args, kwargs, given = "index_select", torch.index_select, (table, 0, index), {}, [table]
        is_written = name in _INDEXED_WRITES or name.removesuffix("_") in _WRITING
        changed = given[:1] if is_written else rows
        picks = bool(changed) and self._picks(name, args, kwargs)
        if picks or any(a in self._indexed for a in given):
            self._indexed.update((one, None) for one in (*rows, *changed))
        if picks:
            self._note_owners(name, func, args, kwargs, output)
            if any(one.dim() and len(one) != self._batch_size for one in changed):
                is_even = not is_written and self._is_even(name, args, kwargs)
                self._are_even.update((one, is_even) for one in rows if not is_written)
                # Of a mask's as many of each now need not be as many of each later.
                if not is_even or any(map(_is_mask, flatten(args[1:]))):
                    by = by or name.strip("_")
                    rows = rows if not is_written else [*rows, *changed]
            elif not is_written and name not in _JOINING:
                # From what the numbers follow by which they were picked makes no difference to which they are.
                is_one = self._is_one_of_each(name, func, args, kwargs)
                known = [self._one_of_each.get(given[0], True) and is_one]
            elif name in _JOINING and all(one in self._owners for one in given):
                joined = torch.cat([self._owners[one] for one in given])
                known = [torch.equal(joined, torch.arange(self._batch_size, device=joined.device))]
        elif name in _VIEWING and (is_even := self._are_even.get(given[0])) is not None:
            known += [is_even] * (len(made) == 1 and made[0].shape[:1] == (self._batch_size,))
        if by is not None:
            self._picked.update((one, by) for one in rows)
        if known:
            self._one_of_each.update((one, all(known)) for one in made if one.dtype != torch.bool)

    def is_data(self, tensor: Tensor) -> bool:
        """Whether it was computed from the batch."""
        if tensor in self._data:
            return True
        return tensor.requires_grad and not isinstance(tensor, (nn.Parameter, WatchedParameter))

    def picked_by(self, tensor: Tensor) -> str | None:
        """Which operation picked rows that `tensor` was computed from; None if none did."""
        return self._picked.get(tensor, None if tensor in self._data else self._within[0])  # type: ignore[no-any-return]

    def forget(self, tensor: Tensor) -> None:
        """Takes note that its rows are as many of each, in order, however they came there."""
        for known in (self._picked, self._one_of_each, self._are_even, self._indexed, self._owners):
            known.pop(tensor, None)

    def follows_index(self, tensor: Tensor) -> bool:
        """Whether it was computed from rows that were picked, be they as many of each."""
        return tensor in self._indexed

    def has_one_of_each(self, tensor: Tensor) -> bool | None:
        """Of B rows, or (B, k), that follow from picked ones, whether row i was example i's; None of anything else."""
        found: bool | None = self._one_of_each.get(tensor, None if tensor in self._data else self._within[1])
        return found

    def _note_owners(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Whose the rows are that are picked of B."""
        source = args[0] if args else None
        if name not in _CHOOSING or not isinstance(source, Tensor) or len(source) != self._batch_size:
            return
        owners = torch.arange(self._batch_size, device=source.device)
        shape = [-1, *[1] * (source.dim() - 1)]
        picked = flatten(func(owners.view(shape).expand(source.shape), *args[1:], **kwargs))
        for one, own in zip(tensors_in(output), picked, strict=True):
            if one.dim() and one.numel():
                self._owners[one] = own.reshape(len(own), -1)[:, 0]
            elif one.dim():
                self._owners[one] = owners[:0]

    def _picks(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operation picks rows of data, or writes some."""
        tensors = tensors_in(*args, *map(kwargs.get, _FIRST))
        if not tensors or tensors[0].dim() == 0 or isinstance(tensors[0], WatchedParameter):
            return False
        # What is joined may begin with nothing (an empty cache), which has one axis.
        source = max(tensors, key=Tensor.dim) if name in _JOINING else tensors[0]
        if self._images and source.dim() > 2 and len(source) == self._images and not source.requires_grad:
            return False
        if name in _INDEXING | _INDEXED_WRITES:
            index = args[1] if name.startswith("__") else tuple(slice(None) if i is None else i for i in args[1])
            # What looks up rows of a table has as many as it was given numbers of rows.
            is_lookup = name in _INDEXING and not self.is_data(source) and not any(map(_is_mask, flatten(index)))
            return not is_lookup and _is_along_first(source, index)
        if name == "repeat_interleave":
            return any(isinstance(a, Tensor) and a.numel() > 1 for a in (*args[1:], *kwargs.values()))
        if (place := _WRITING.get(name.removesuffix("_"))) is not None:
            return _is_first(place, args, kwargs, source)
        place = _PICKING.get(name)
        is_of_data = place is not None and any(map(self.is_data, tensors if name in _JOINING else [source]))
        return place is not None and is_of_data and _is_first(place, args, kwargs, source)

    def _is_one_of_each(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the B rows that an operation picks of B k are one of each example, in order."""
        source, size = args[0] if args else None, self._batch_size
        if name == "as_strided":  # windows within rows, as its numbers say, which preflight has compared
            return isinstance(source, Tensor) and len(source) == size
        if name not in _CHOOSING or not isinstance(source, Tensor):
            return False
        if len(source) != size and source in self._picked:  # of which nobody knows whose they are
            return False
        first = torch.arange(size, device=source.device)[:, None]
        # Of sequences (T, B, ...) the examples are second.
        for axis in [0] * (len(source) % size == 0) + [1] * (source.shape[1:2] == (size,)):
            shape = [1] * source.dim()
            shape[axis] = -1
            owners = first.squeeze(1).repeat_interleave(source.shape[axis] // size).view(shape).expand(source.shape)
            found = flatten(func(owners, *args[1:], **kwargs))
            if all(bool((one.reshape(size, -1) == first).all()) for one in found):
                return True
        return False

    def _is_even(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the rows that an index picks of B k are known to be as many of each example, in order."""
        source, size = args[0] if args else None, self._batch_size
        if not isinstance(source, Tensor) or len(source) % size or source in self._picked or kwargs:
            return False
        parts = args[1] if name == "__getitem__" and isinstance(args[1], tuple) else args[-1:]
        if name not in ("__getitem__", "index_select") or not all(isinstance(part, Tensor) for part in parts):
            return False
        axes = sum(part.dim() if _is_mask(part) else 1 for part in parts)
        owners = torch.arange(size, device=source.device).repeat_interleave(len(source) // size)
        found = owners.view(-1, *[1] * (axes - 1)).expand(source.shape[:axes])[tuple(parts)].reshape(-1)
        return len(found) % size == 0 and torch.equal(
            found, owners[:: len(source) // size].repeat_interleave(len(found) // size)
        )


def _is_first(place: tuple[int, int | None] | tuple[()], args: tuple[Any, ...], kwargs: Any, source: Tensor) -> bool:
    """Whether an operation works along the first axis."""
    if not place:
        return True
    position, default = place
    found = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else default))
    return not isinstance(found, int) or found % source.dim() == 0


def _is_along_first(source: Tensor, index: Any) -> bool:
    """Whether an index picks some rows of the first axis, other than a single one."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if parts and parts[0] is Ellipsis:
        parts = parts[1:]
        taken = sum(part.dim() if _is_mask(part) else part is not None for part in parts)
        if taken < source.dim():
            return False
    first = next((part for part in parts if part is not None), slice(None))
    if isinstance(first, slice):
        return first.indices(len(source)) != (0, len(source), 1)
    is_number = isinstance(first, Tensor) and first.dim() == 0 and not _is_mask(first)
    return isinstance(first, bool) or not (is_number or isinstance(first, int))


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
