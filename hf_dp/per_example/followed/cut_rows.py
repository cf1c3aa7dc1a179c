"""Whose the rows are of pieces that were picked of one of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.axes import Axes, are_put_back, are_put_to_own, in_order, numbers_of
from hf_dp.per_example.followed.numbers import writes
from hf_dp.per_example.followed.operations import works_by_rows
from hf_dp.per_example.followed.picking import CHOOSING, JOINING, Operation
from hf_dp.per_example.watched import tensors_in


class CutRows:
    """Follows pieces, as long as what is done to them works on each row by itself.

    Args:
        batch_size: B.
        axes: where examples lie; gets those of what is picked and joined.
    """

    def __init__(self, batch_size: int, axes: Axes) -> None:
        self._batch_size, self._axes = batch_size, axes
        self._known: Any = WeakIdKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._known

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tensor: Tensor) -> tuple[int, Tensor | None]:
        """Along which axis rows lie, and the example of each, -1 where others were written; None if it is no piece."""
        if tensor not in self._known:
            return self._axes.of(tensor), None
        axis, rows, count = self._known[tensor]
        return axis, rows if count == writes(tensor) else torch.full_like(rows, -1)

    def note(self, tensor: Tensor, axis: int, rows: Tensor) -> None:
        """Takes note of a piece."""
        self._known[tensor] = axis, rows, writes(tensor)

    def pop(self, tensor: Tensor, default: None) -> None:
        """Forgets one."""
        self._known.pop(tensor, default)

    def cut(self, op: Operation, axis: int, leads: Callable[[Tensor], bool]) -> None:
        """Takes note of what is picked of B rows, one of each: of others their numbers do not tell; `leads` as `Alone`
        has it."""
        source, size = op.source, self._batch_size
        if op.name not in CHOOSING or source is None or not leads(source):
            return
        made = tensors_in(op.output) if source.shape[axis] == size else []
        for one, own in zip(made, op.on(numbers_of(source, axis, size)) if made else [], strict=True):
            if one.dim() > axis:
                numbers = own.movedim(axis, 0)
                self.note(one, axis, numbers.reshape(len(numbers), -1)[:, 0] if own.numel() else own.flatten())

    def keep(self, op: Operation, data: list[Tensor]) -> None:
        """Takes note of what is computed row by row from pieces, all of which belong to the same."""
        source, made = op.source, tensors_in(op.output)
        if source is None or source not in self._known or not works_by_rows(op):
            return
        axis, rows, count = self._known[source]
        others = [self.of(one) for one in data if one.shape[:1] == source.shape[:1] and one is not source]
        # As they were before, if it was this operation that wrote into it.
        is_same = writes(source) - count == any(one is source for one in made) and not axis
        is_same &= all(not at and own is not None and torch.equal(own, rows) for at, own in others)
        for one in made:
            if one.shape[:1] == rows.shape:
                self.note(one, 0, rows if is_same else torch.full_like(rows, -1))

    def are_whole(self, pieces: list[Tensor]) -> bool:
        """Whether pieces, whose they are known, are one of each example, in order."""
        owners = torch.cat([rows for one in pieces if (rows := self.of(one)[1]) is not None])
        return torch.equal(owners, torch.arange(self._batch_size, device=owners.device))

    def axis(self, op: Operation) -> int:
        """Where the examples lie in what an operation picks of."""
        tensors = [one for one in op.picked_of if one.dim()]
        several = tensors if op.name in JOINING else tensors[:1]
        return max((self.of(one)[0] for one in several), default=0)

    def along(self, op: Operation, axis: int, leads: Callable[[Tensor], bool]) -> bool | None:
        """Whether what is picked along another axis than the first is one of each example, in order; None of others."""
        made, size = tensors_in(op.output), self._batch_size
        if op.name in JOINING:
            if not all(one in self and self.of(one)[0] == axis for one in op.picked_of):
                return None
            self._axes.note(made[0], axis, all(map(self._axes.is_sure, op.picked_of)))
            return self.are_whole(op.picked_of)
        source = op.source
        if op.name not in CHOOSING or source is None or source.shape[axis] != size:
            return False
        found = op.on(numbers_of(source, axis, size))
        if len(found) > 1 or (found[0].dim() == source.dim() and found[0].shape[axis] < size):
            self.cut(op, axis, leads)
            return None
        place = in_order(found[0], size)
        if place is not None:
            self._axes.note(made[0], place, self._axes.is_sure(source))
        elif found[0].numel() and size not in found[0].shape:
            self.note(made[0], 0, found[0].reshape(len(found[0]), -1)[:, 0])
            return None
        return place is not None

    def put(self, op: Operation, axis: int, leads: Callable[[Tensor], bool]) -> bool | None:
        """Whether rows that are written along an axis come to their own examples; None where nobody knows whose."""
        value, size = op.args[-1], self._batch_size
        if op.kwargs or not isinstance(value, Tensor) or not value.dim() or op.args[0].shape[axis] != size:
            return None
        first, rows = self.of(value)
        if rows is None and value.shape[first] != size:
            return None
        if not axis:
            whose = torch.arange(size, device=value.device) if rows is None else rows
            return None if first or len(whose) < 1 else are_put_to_own(op.name, op.args, whose)
        return are_put_back(op.func, op.args, axis, size, first, rows) and leads(value)
