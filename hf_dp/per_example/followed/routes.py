"""Whose rows are, once they were picked, or sorted, by what is in them.

Rows of all examples in order, (B k, ...), are picked by masks and by numbers that follow from the data: those of an
expert, or the marked ones. What picks rows picks their owners with them, what works on each row by itself leaves them,
and what is written back lies as it did before where each row comes to one of its own example. After any other operation
nobody knows, and what needs to is refused. That a row follows from its own example alone is compared elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.numbers import RowNumbers, writes
from hf_dp.per_example.followed.owners import are_same, of_rows
from hf_dp.per_example.followed.picking import Operation
from hf_dp.per_example.order import Order
from hf_dp.per_example.watched import tensors_in


class Routes:
    """Whose the rows of tensors are, in one micro-batch of `batch_size` examples, B."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        # With torch's count of writes then: who writes through a view changes whose rows they are.
        self._owners: Any = WeakIdKeyDictionary()
        self._in_order: dict[tuple[int, torch.device], Tensor] = {}
        self._orders: Any = WeakIdKeyDictionary()
        self._one_of_each: Any = WeakIdKeyDictionary()
        self._depth = 0
        # Whether a module of experts has run, which picks or sorts the rows that it is given.
        self.were_in_experts = False
        # By their number, and by its identity, what says whose rows are that were picked.
        self._noted: dict[int, dict[int, Tensor]] = {}
        self.numbers = RowNumbers()
        self._blank: Any = WeakIdKeyDictionary()
        self._within: Tensor | None = None
        # Lists of a number for each example, by their identity.
        self._lists: dict[int, list[Any]] = {}

    @property
    def are_in_experts(self) -> bool:
        """Whether a module of experts is running, which sorts the rows that it was given."""
        return self._depth > 0

    @contextmanager
    def inside_experts(self) -> Iterator[None]:
        """Inside, one is."""
        self._depth += 1
        self.were_in_experts = True
        try:
            yield
        finally:
            self._depth -= 1

    def order(self, tensor: Tensor, is_sorted: bool) -> Order | None:
        """Where the rows of the first example are, and those of the others; None where that is not known.

        Args:
            tensor: with n rows.
            is_sorted: whether it is asked of rows that are in order as well.
        """
        size, owners = self.batch_size, self.of(tensor)
        if size == 1:
            owners = torch.zeros(len(tensor), dtype=torch.long, device=tensor.device) if is_sorted else None
        if owners is None or len(owners) != len(tensor) or (self.are_in_order(owners) and not is_sorted):
            return None
        if owners not in self._orders:  # as they are of all that was computed from the same rows
            self._orders[owners] = Order.of(owners, size)
        found: Order = self._orders[owners]
        return found

    def of(self, tensor: Tensor) -> Tensor | None:
        """(n,) the example of each row, if that is known."""
        owners = self.known(tensor)
        return of_rows(owners, tensor)

    def known(self, tensor: Tensor) -> Tensor | None:
        """The same, or () the one example that all of it is of."""
        if not self._owners and self._within is None:  # as of nearly all models
            return None
        owners, version = self._owners.get(tensor, (None, 0))
        if owners is None and self._within is not None and tensor.shape[:1] == self._within.shape:
            return self._within
        return owners if version == writes(tensor) else None

    @contextmanager
    def within(self, owners: Tensor | None) -> Iterator[None]:
        """Inside, what is not known, and has as many rows, is theirs."""
        self._within = owners
        try:
            yield
        finally:
            self._within = None

    def note(self, tensor: Tensor, owners: Tensor | None) -> None:
        """Whose its rows are, or that nobody knows."""
        if owners is None:
            self._owners.pop(tensor, None)
        elif not owners.dim():
            self._owners[tensor] = owners.to(tensor.device), writes(tensor)
            if tensor.dim() > 1:  # a row by itself is no rows
                self._noted.setdefault(len(tensor), {})[id(owners)] = owners.expand(len(tensor))
        elif tensor.shape[:1] == owners.shape or tensor.shape[:2] == (1, len(owners)):
            if owners.device != tensor.device:
                is_known = self.are_in_order(owners)
                owners = self.in_order(len(owners), tensor.device) if is_known else owners.to(tensor.device)
            self._owners[tensor] = owners, writes(tensor)
            if len(owners) % self.batch_size == 0 and not self.are_in_order(owners):
                self._noted.setdefault(len(owners), {})[id(owners)] = owners

    def note_made(self, op: Operation, unseen: bool) -> None:
        """Takes note of what an operation gave, which tells of rows; `unseen` as `RowNumbers` has it."""
        self.numbers.follow(op, unseen)
        if op.name == "tolist" and op.args[0].dim() == 1 and self.is_restored(op.args[0]):
            self._lists[id(op.output)] = op.output
        if op.name.removeprefix("new_").removesuffix("_like") in ("zeros", "empty", "ones", "full"):
            self._blank.update((one, writes(one)) for one in tensors_in(op.output))

    def has_one_for_each(self, several: Any) -> bool:
        """Whether a list holds one number for each example, in order."""
        return self._lists.get(id(several)) is several is not None and len(several) == self.batch_size

    def are_one_of_each(self, owners: Tensor) -> bool:
        """Whether as many rows as examples are; of others it says nothing."""
        if owners.shape != (self.batch_size,):
            return True
        if owners not in self._one_of_each:
            self._one_of_each[owners] = torch.equal(owners, self.in_order(len(owners), owners.device))
        return bool(self._one_of_each[owners])

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether it, or what it is a view of, was made to be written to, and nothing was since."""
        made = tensor if tensor._base is None else tensor._base
        return bool(self._blank.get(made, -1) == writes(made))

    def in_order(self, rows: int, device: torch.device) -> Tensor:
        """The owners of so many rows that lie in order."""
        if (rows, device) not in self._in_order:
            numbers = torch.arange(self.batch_size, device=device)
            self._in_order[rows, device] = numbers.repeat_interleave(rows // self.batch_size)
        return self._in_order[rows, device]

    def is_restored(self, tensor: Tensor) -> bool:
        """Whether its rows are known to lie in order."""
        owners = self.of(tensor)
        return owners is not None and self.are_in_order(owners)

    def others_of(self, rows: int, besides: Tensor | None) -> Iterator[Tensor]:
        """What is known to be the owners of so many rows that do not lie in order, `besides` these."""
        for one in self._noted.get(rows, {}).values():
            if not are_same(one, besides) and not are_same(one, self.in_order(rows, one.device)):
                yield one

    def sorted_back(self, owners: Tensor) -> Tensor:
        """The same, called what it is where all rows are in order."""
        if len(owners) % self.batch_size:
            return owners
        known = self.in_order(len(owners), owners.device)
        return known if torch.equal(owners, known) else owners

    def are_in_order(self, owners: Tensor) -> bool:
        """Whether these are those of rows that lie in order."""
        return owners is self._in_order.get((len(owners), owners.device))
