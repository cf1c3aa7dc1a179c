"""What follows from one example alone, and is put together again by a loop in Python: in which order, no index says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.axes import Axes, is_cut_across, is_mask, is_plainly_folded, part_along
from hf_dp.per_example.followed.numbers import writes
from hf_dp.per_example.followed.operations import works_by_rows
from hf_dp.per_example.followed.picking import CHOOSING, JOINING, MAKING, PIECES, STACKING, VIEWING, Operation
from hf_dp.per_example.watched import flatten, tensors_in

# What gives one row, or several, after another of its first argument, along an axis that is given in this place.
_APART = {"unbind": 1, "__iter__": 9, "vsplit": 9, **dict.fromkeys(PIECES, 2)}
_WRITING = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
# Of what these are given besides they take the shape, or the kind.
_SHAPING = ("view_as", "reshape_as", "expand_as", "type_as")
_PICKING = ("select", "narrow", "index_select")
_CUTTING = {"__getitem__", *_PICKING, *_APART}
_JOINING = {*JOINING, *STACKING, "hstack", "column_stack"}


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
        # Of what rows were written into: the only example whose these are, None if there are several; whether all came
        # to their own places; and whether there was nothing of the batch before.
        self._writes: Any = WeakIdKeyDictionary()
        # The example of what is known to be its own by operations alone; and torch's count of writes then.
        self._surely: Any = WeakIdKeyDictionary()
        # What was joined of one row, or several, of each example, in order.
        self._in_order: Any = WeakIdKeyDictionary()

    def is_of_one(self, tensor: Tensor) -> bool:
        """Whether as many rows as there are examples, or several times as many, are of one alone."""
        return tensor in self._example and tensor.dim() > 0 and len(tensor) > 0 == len(tensor) % self._batch_size

    def is_in_order(self, tensor: Tensor) -> bool:
        """Whether a loop has put it together of as many rows of each example, in order, as far as it has come."""
        return tensor in self._in_order or (tensor in self._writes and self._writes[tensor][1])

    @staticmethod
    def writes(function: Any) -> bool:
        """Whether a torch function writes into its first argument, row by row maybe."""
        name = getattr(function, "__name__", "")
        return name in _WRITING or (name.endswith("_") and not name.endswith("__"))

    def of(self, tensor: Tensor) -> int | None:
        """The example that it follows from alone, if that is known."""
        only, _, was_new = self._writes.get(tensor, (None, False, False))
        found: int | None = self._example.get(tensor, only if was_new else None)
        return found

    def surely(self, tensor: Tensor) -> int | None:
        """The same, where operations tell so from the batch on, whatever sizes there are."""
        example, count = self._surely.get(tensor, (None, 0))
        return example if count == writes(tensor) else None

    def one_of(self, several: Iterable[Tensor]) -> int | None:
        """The one example of all of these, if that is so."""
        if not len(self._surely):
            return None
        found = {self.surely(one) for one in several}
        return found.pop() if len(found) == 1 else None

    def is_alone(self, tensor: Tensor) -> bool:
        """Whether nothing of another example is in it, as far as anybody knows."""
        return self.of(tensor) is not None

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
        # Only since it was written to there is something of the batch in what is new.
        data = [one for one in data if not (is_new and one is source)]
        if size == 1 or op.name in MAKING or not data:
            return []
        self._keep_sure(op, data, is_new)
        # A table is looked up in, and not cut, whatever its sizes are.
        whole = source if any(one is source for one in data) else None
        is_cut = whole is not None and op.name in _CUTTING and whole not in self._example and not axes.of(whole)
        if whole is not None and is_cut and (is_cut_across(whole, size) or axes.is_unclear(whole)):
            return [Owned(one, True, False) for one in tensors_in(op.output) if one.numel() < whole.numel()]
        if whole is not None and self._may_cut(op, whole, axes, leads):
            self._cut(op, whole, axes)
            return []
        owned, joined = self._written(op, data, is_new, axes), self._joined(op)
        made = [one for one in tensors_in(op.output) if one.dtype != torch.bool]
        # What is chosen of one example's is that example's, whatever it is chosen by.
        is_chosen = op.name in CHOOSING and source is not None and source in self._example
        is_of_first = is_chosen or op.name in _SHAPING
        found = {self.of(one) for one in (data[:1] if is_of_first and data[0] is source else data)}
        is_own = joined is not None and joined.are_in_order(size)
        is_each = joined is not None and len(joined.owners) == size
        # Of what lies side by side a view may be as many rows as examples.
        is_own = is_own and (is_each or (joined is not None and not joined.axis))
        if len(found) == 1 and None not in found and not (is_each and is_own):
            is_placed = source is not None and source in self._writes and source not in self._example
            if is_placed and (op.name in VIEWING or works_by_rows(op)):
                self._writes.update((one, self._writes[source]) for one in made)
            else:
                self._example.update((one, *found) for one in tensors_in(op.output))
            return owned
        written = [one for one in tensors_in(op.output, op.args[: op.is_in_place]) if any(one is a for a in data)]
        made += [one for one in written if self._example.pop(one, None) is not None]
        if found == {None}:
            is_row = is_each and op.name in STACKING and not all(map(axes.may_lead, data))
            return [*owned, *(Owned(one, True, False) for one in made if is_row)]
        if joined is None or None in found:  # nobody knows which of these rows are whose
            return [*owned, *(Owned(one, True, False) for one in made)]
        if is_each and (len(op.output) != size if joined.axis else is_own):
            axes.note(op.output, joined.axis, sure=False)
        elif joined.axis and is_own and is_each:  # with as many positions as examples, nobody knows which is which
            return owned
        if is_own:
            self._in_order[op.output] = None
            axes.note_whole(op.output)
        return [*owned, Owned(op.output, is_each, is_own)]

    def _keep_sure(self, op: Operation, data: list[Tensor], is_new: bool) -> None:
        """What follows from one example alone is its own, by whatever operation; what was written to only where it was
        its own before, or nothing was written before."""
        target = op.source if op.name == "__setitem__" else None
        made, given = tensors_in(op.output if target is None else target), tensors_in(op.args, op.kwargs)
        if not len(self._surely) or not made:
            return
        found = set()
        for one in data:
            example, count = self._surely.get(one, (None, 0))
            is_own = writes(one) == count or (writes(one) == count + 1 and any(one is other for other in made))
            found.add(example if is_own else None)
        if len(found) == 1 and None not in found:
            for one in made:
                # Never written to before, by whatever name.
                is_its_own = one in self._surely or (is_new and one is op.source and writes(one) == 1)
                if is_its_own or not any(one is other for other in given):
                    self._surely[one] = *found, writes(one)

    def _may_cut(self, op: Operation, source: Tensor, axes: Axes, leads: Callable[[Tensor], bool]) -> bool:
        if op.name not in _CUTTING or source in self._example or not source.dim() or not leads(source):
            return False
        axis = axes.of(source)
        return source.shape[axis] == self._batch_size or (not axis and is_plainly_folded(source, self._batch_size))

    def _written(self, op: Operation, data: list[Tensor], is_new: bool, axes: Axes) -> list[Owned]:
        """What rows of several examples were written into, one after another."""
        target = op.source if self.writes(op.func) else None
        given = tensors_in(op.args[1:], op.kwargs)
        if target is None or not given:
            return []
        # Where rows are written, by numbers that follow from others, is no part of what is written.
        values = [] if op.is_written else [a for a in given if a.is_floating_point() and any(a is one for one in data)]
        values = values or given[-1:]
        examples, owned = {self.of(one) for one in values}, list[Owned]()
        is_data = any(values[-1] is one for one in data)
        example = examples.pop() if len(examples) == 1 else None
        is_set, axis = op.name == "__setitem__" and target.dim() > 0, axes.of(target)
        places = [(target, axis, _rows_of(part_along(target, op.args[1], axis), target.shape[axis]))] if is_set else []
        if target._base is not None:
            places.append((target._base, 0, _rows_in(target, target._base)))
        for one, axis, rows in places:
            several, own = one.shape[axis] if one.dim() else 1, self._example.get(one, example)
            if example is None or own != example:
                is_mixed = is_data and (own is not None or bool(examples - {None}))
                if one in self._writes or is_mixed:
                    self._writes[one] = None, False, False
                # Of one that came from nobody knows where.
                is_part = rows is not None and rows[1] - rows[0] < several and not axes.may_lead(values[-1])
                if is_data and (is_part or is_mixed):
                    self._example.pop(one, None)
                    owned.append(Owned(one, True, False))
                continue
            is_whole = rows is not None and several % self._batch_size == 0
            only, is_own, was_new = self._writes.get(one, (example, True, is_new))
            is_own = is_own and rows is not None and is_whole and self._example_at(several, *rows) == example
            self._writes[one] = example if only == example else None, is_own, was_new
            if only != example:
                self._example.pop(one, None)
                owned.append(Owned(one, several == self._batch_size, is_own))
            elif was_new and not is_own:
                self._example[one] = example
        return owned

    def _example_at(self, rows: int, begin: int, end: int) -> int | None:
        """Whose those of so many `rows` are, if they are one example's."""
        each = rows // self._batch_size
        return begin // each if begin < end and begin // each == (end - 1) // each else None

    def _cut(self, op: Operation, source: Tensor, axes: Axes) -> None:
        axis = axes.of(source)
        pieces, rows = flatten(op.output), source.shape[axis]
        if op.name == "__getitem__" or op.name in _PICKING:
            names = ("dim", "start", "index", "length")
            given = (*op.args[1:], *(op.kwargs[name] for name in names if name in op.kwargs))
            index = part_along(source, given[0], axis) if op.name == "__getitem__" else given[1]
            if op.name in _PICKING and given[0] % source.dim() != axis:
                return
            if op.name == "narrow":
                index = slice(int(index), int(index) + given[2])
            ranges = [_rows_of(index, rows)] * len(pieces)
        elif op.axis_at(_APART[op.name]) % source.dim() != axis:
            return
        else:
            ends = accumulate(1 if one.dim() < source.dim() else one.shape[axis] for one in pieces)
            ranges = [*pairwise((0, *ends))]
        for one, taken in zip(pieces, ranges, strict=True):
            if taken is not None and (example := self._example_at(rows, *taken)) is not None:
                self._example[one] = example
                if rows == self._batch_size and axes.is_sure(source):
                    self._surely[one] = example, writes(one)

    def _joined(self, op: Operation) -> Joined | None:
        made, pieces = op.output, op.picked_of
        if op.name not in _JOINING or not isinstance(made, Tensor) or not pieces:
            return None
        axis, is_new = op.join
        axis %= made.dim()
        sizes = [1 if is_new else one.shape[axis] if one.dim() > axis else 0 for one in pieces]
        owners = [self.of(one) for one, n in zip(pieces, sizes, strict=True) for _ in range(n)]
        return Joined(axis, owners) if len(owners) == made.shape[axis] else None


def _rows_of(index: Any, size: int) -> tuple[int, int] | None:
    """From which row to which an index takes, if these lie together."""
    # Of several that happen to be one, another time there may be none, or more.
    if isinstance(index, Tensor) and not index.dim() and not is_mask(index):
        index = int(index)
    if isinstance(index, slice):
        taken = range(*index.indices(size))
        return (min(taken), max(taken) + 1) if taken and (taken.step == 1 or len(taken) == 1) else None
    is_number = isinstance(index, int) and not isinstance(index, bool)
    return (index % size, index % size + 1) if is_number and size else None


def _rows_in(view: Tensor, whole: Tensor) -> tuple[int, int] | None:
    """The same of the rows that a view has of something whole."""
    if not view.numel() or not whole.dim() or not whole.is_contiguous():
        return None
    begin = view.storage_offset() - whole.storage_offset()
    end = begin + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
    return begin // whole.stride(0), end // whole.stride(0) + 1
