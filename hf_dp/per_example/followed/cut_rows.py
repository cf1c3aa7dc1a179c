"""Whose the rows are of pieces that were picked of one of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.axes import numbers_of
from hf_dp.per_example.followed.operations import works_by_rows
from hf_dp.per_example.followed.picking import CHOOSING, Operation
from hf_dp.per_example.watched import tensors_in


class CutRows:
    """Follows pieces, as long as what is done to them works on each row by itself.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._known: Any = WeakIdKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._known

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tensor: Tensor, axis: int = 0) -> tuple[int, Tensor | None]:
        """Along which axis they lie, and the example of each; `axis` and None where that is not known."""
        found: tuple[int, Tensor | None] = self._known.get(tensor, (axis, None))
        return found

    def note(self, tensor: Tensor, axis: int, rows: Tensor) -> None:
        """Takes note of a piece."""
        self._known[tensor] = axis, rows

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
                self._known[one] = axis, numbers.reshape(len(numbers), -1)[:, 0] if own.numel() else own.flatten()

    def keep(self, op: Operation, data: list[Tensor]) -> None:
        """Takes note of what is computed row by row from pieces, all of which belong to the same."""
        source = op.source
        if source is None or source not in self._known or not works_by_rows(op):
            return
        axis, rows = self._known[source]
        others = [self._known.get(one, (1, None)) for one in data if one.shape[:1] == source.shape[:1]]
        if not axis and all(not at and (own is rows or torch.equal(own, rows)) for at, own in others):
            self._known.update((one, (0, rows)) for one in tensors_in(op.output) if one.shape[:1] == rows.shape)

    def are_whole(self, pieces: list[Tensor]) -> bool:
        """Whether pieces, whose they are known, are one of each example, in order."""
        owners = torch.cat([self._known[one][1] for one in pieces])
        return torch.equal(owners, torch.arange(self._batch_size, device=owners.device))
