"""What follows from one example alone, and is put together again by a loop in Python: in which order, no index says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.axes import Axes, is_mask, is_plainly_folded
from hf_dp.per_example.followed.operations import axis_of
from hf_dp.per_example.followed.picking import MAKING, Operation
from hf_dp.per_example.followed.picks import PIECES
from hf_dp.per_example.watched import flatten, tensors_in

# What gives one row, or several, after another of its first argument, along an axis that is given in this place.
_APART = {"unbind": 1, "__iter__": 9, "vsplit": 9, **dict.fromkeys(PIECES, 2)}
_WRITING = ("__setitem__", "copy_", "add_", "__iadd__")
_CUTTING = {"__getitem__", "select", *_APART}
_JOINING = ("cat", "concat", "concatenate", "vstack", "row_stack", "hstack", "column_stack", "stack", "pad_sequence")


class Joined(NamedTuple):
    """Pieces that are one tensor again.

    Attributes:
        axis: along which they lie.
        owners: of each row there the example; None of what is nobody's.
    """

    axis: int
    owners: list[int | None]

    def are_in_order(self, size: int) -> bool:
        """Whether they are as many of each of so many examples, in order; what is nobody's may be any's of one each."""
        each = len(self.owners) // size
        whose = [place // max(each, 1) for place in range(len(self.owners))]
        return all(one == at or (one is None and each == 1) for one, at in zip(self.owners, whose, strict=True))


class Owned(NamedTuple):
    """A tensor of which it was seen whose some rows are.

    Attributes:
        is_each: whether it has as many as there are examples.
        is_own: whether those that were seen are as many of each, in order.
    """

    tensor: Tensor
    is_each: bool
    is_own: bool


class Alone:
    """Follows what was cut out of one example.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._example: Any = WeakIdKeyDictionary()
        # Of these what was put together row by row.
        self._put_together: Any = WeakIdKeyDictionary()
        # Of what rows were written into: the only example whose these are, None if there are several; whether all came
        # to their own places; and whether there was nothing of the batch before.
        self._writes: Any = WeakIdKeyDictionary()
        # What was joined of one row, or several, of each example, in order.
        self._in_order: Any = WeakIdKeyDictionary()

    def is_of_one(self, tensor: Tensor) -> bool:
        """Whether as many rows as there are examples, or several times as many, were put together of one alone."""
        return tensor in self._put_together and tensor in self._example and tensor.dim() > 0

    def is_in_order(self, tensor: Tensor) -> bool:
        """Whether a loop has put it together of as many rows of each example, in order, as far as it has come."""
        return tensor in self._in_order or (tensor in self._writes and self._writes[tensor][1])

    @staticmethod
    def writes(function: Any) -> bool:
        """Whether a torch function writes into its first argument, row by row maybe."""
        return getattr(function, "__name__", "") in _WRITING

    def of(self, tensor: Tensor) -> int | None:
        """The example that it follows from alone, if that is known."""
        found: int | None = self._example.get(tensor)
        return found

    def is_alone(self, tensor: Tensor) -> bool:
        """Whether nothing of another example is in it, as far as anybody knows."""
        return tensor in self._example

    def follow(
        self, op: Operation, data: list[Tensor], axes: Axes, leads: Callable[[Tensor], bool], is_new: bool
    ) -> list[Owned]:
        """What an operation has put together, or written into, of several examples.

        Args:
            op: what was run.
            data: those of its arguments that anything of the batch is in.
            axes: along which examples lie; gets those of what is joined.
            leads: whether nobody knows that the rows of one are not the examples', in order.
            is_new: whether there was nothing of the batch in what it writes into.
        """
        source, size = op.source, self._batch_size
        if size == 1 or op.name in MAKING:
            return []
        owned, joined = self._written(op, is_new), self._joined(op)
        found = {self._example.get(one) for one in data}
        is_each = joined is not None and len(joined.owners) == size
        is_own = joined is not None and joined.are_in_order(size)
        if len(found) == 1 and None not in found and not (is_each and is_own):
            made, (example,) = tensors_in(op.output), found
            self._example.update((one, example) for one in made)
            if joined is not None or any(one in self._put_together for one in data):
                self._put_together.update((one, None) for one in made)
            return owned
        for one in tensors_in(op.output, op.args[: op.is_in_place]):
            if any(one is other for other in data):  # it was written to
                self._example.pop(one, None)
        if None in found:
            is_cut = op.name in _CUTTING and source is not None and source.dim() > 0 and leads(source)
            if source is not None and is_cut and (len(source) == size or is_plainly_folded(source, size)):
                self._cut(op, source)
            return owned
        if joined is None:
            return owned
        if is_each and joined.axis and len(op.output) != size:
            axes.note(op.output, joined.axis)
        elif joined.axis and (is_own or not is_each):  # with as many positions as examples, nobody knows which is which
            return owned
        if is_own:
            self._in_order[op.output] = None
        return [*owned, Owned(op.output, is_each, is_own)] if is_each or len(joined.owners) % size == 0 else owned

    def _written(self, op: Operation, is_new: bool) -> list[Owned]:
        """What rows of several examples were written into, one after another."""
        target, value = op.source, op.args[-1] if op.name in _WRITING and len(op.args) > 1 else None
        if target is None or not isinstance(value, Tensor) or value not in self._example:
            return []
        example, owned = self._example[value], []
        places = [(target, _rows_of(op.args[1], len(target)))] if op.name == "__setitem__" and target.dim() else []
        if target._base is not None:
            places.append((target._base, _rows_in(target, target._base)))
        for one, rows in places:
            is_whole = rows is not None and len(one) % self._batch_size == 0
            only, is_own, was_new = self._writes.get(one, (example, True, is_new))
            is_own = is_own and rows is not None and is_whole and self._example_at(one, *rows) == example
            self._writes[one] = example if only == example else None, is_own, was_new
            if only != example:
                self._example.pop(one, None)
                owned += [Owned(one, len(one) == self._batch_size, is_own)] if is_whole else []
            elif was_new and not is_own:
                self._example[one] = example
                self._put_together[one] = None
        return owned

    def _example_at(self, tensor: Tensor, begin: int, end: int) -> int | None:
        """Whose these rows are, if they are one example's."""
        each = len(tensor) // self._batch_size
        return begin // each if begin < end and begin // each == (end - 1) // each else None

    def _cut(self, op: Operation, source: Tensor) -> None:
        pieces = flatten(op.output)
        if op.name in ("__getitem__", "select"):
            given = (*op.args[1:], *(op.kwargs[name] for name in ("dim", "index") if name in op.kwargs))
            index = given[0] if op.name == "__getitem__" else given[1] if given[0] == 0 else None
            ranges = [_rows_of(index, len(source))] * len(pieces)
        elif axis_of(_APART[op.name], op.args, op.kwargs) % source.dim():
            return
        else:
            ends = accumulate(1 if one.dim() < source.dim() else len(one) for one in pieces)
            ranges = [*pairwise((0, *ends))]
        for one, rows in zip(pieces, ranges, strict=True):
            if rows is not None and (example := self._example_at(source, *rows)) is not None:
                self._example[one] = example

    def _joined(self, op: Operation) -> Joined | None:
        made, pieces = op.output, op.picked_of
        if op.name not in _JOINING or not isinstance(made, Tensor) or not pieces:
            return None
        # As torch has it: what has no axis, or one, is a row, or a column.
        is_flat, is_new = pieces[0].dim() < 2, op.name in ("stack", "pad_sequence")
        if op.name == "pad_sequence":
            axis = 0 if op.kwargs.get("batch_first", op.args[1] if len(op.args) > 1 else False) else 1
        elif op.name in ("vstack", "row_stack"):
            axis, is_new = 0, is_flat
        elif op.name in ("hstack", "column_stack"):
            axis = 0 if is_flat and op.name == "hstack" else 1
            is_new = is_flat and (op.name == "column_stack" or not pieces[0].dim())
        else:
            axis = axis_of(1, op.args, op.kwargs) % made.dim()
        sizes = [1 if is_new else one.shape[axis] if one.dim() > axis else 0 for one in pieces]
        owners = [self._example.get(one) for one, n in zip(pieces, sizes, strict=True) for _ in range(n)]
        return Joined(axis, owners) if len(owners) == made.shape[axis] else None


def _rows_of(index: Any, size: int) -> tuple[int, int] | None:
    """From which row to which an index takes, if these lie together."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, (Tensor, list)) and not is_mask(first):
        is_one = first.numel() == 1 if isinstance(first, Tensor) else len(first) == 1
        first = (int(first) if isinstance(first, Tensor) else first[0]) if is_one else None
    elif isinstance(first, slice) and first.step in (None, 1):
        begin, end, _ = first.indices(size)
        return begin, end
    is_number = isinstance(first, int) and not isinstance(first, bool)
    return (first % size, first % size + 1) if is_number and size else None


def _rows_in(view: Tensor, whole: Tensor) -> tuple[int, int] | None:
    """The same of the rows that a view has of something whole."""
    if not view.numel() or not whole.dim() or not whole.is_contiguous():
        return None
    begin = view.storage_offset() - whole.storage_offset()
    end = begin + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    return begin // whole.stride(0), end // whole.stride(0) + 1
