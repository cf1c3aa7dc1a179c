"""Whose rows are, once they were picked, or sorted, by what is in them.

Rows of all examples in order, (B k, ...), are picked by masks and by numbers that follow from the data: those of an
expert, or the marked ones. What picks rows picks their owners with them, what works on each row by itself leaves them,
and what is written back lies as it did before where each row comes to one of its own example. After any other operation
nobody knows, and what needs to is refused. That a row follows from its own example alone is compared elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed import picks
from hf_dp.per_example.followed.numbers import RowNumbers, writes
from hf_dp.per_example.followed.operations import axis_of, is_elementwise, keeps_axes, works_by_rows
from hf_dp.per_example.order import Order
from hf_dp.per_example.watched import WatchedParameter, tensors_in

# Of tensors by their identity: for each of their rows the example.
Known = dict[int, Tensor | None]

_VIEWS = ("view", "reshape", "flatten")
_REPEATING = ("repeat_interleave", "repeat")


class Routes:
    """Whose the rows of tensors are, in one micro-batch of `batch_size` examples, B."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # With torch's count of writes then: who writes through a view changes whose rows they are.
        self._owners: Any = WeakIdKeyDictionary()
        self._in_order: dict[tuple[int, torch.device], Tensor] = {}
        self._orders: Any = WeakIdKeyDictionary()
        self._depth = 0
        # By their number, and by its identity, what says whose rows are that were picked.
        self._noted: dict[int, dict[int, Tensor]] = {}
        self._numbers = RowNumbers()
        self._blank: Any = WeakIdKeyDictionary()

    @property
    def are_in_experts(self) -> bool:
        """Whether a module of experts is running, which sorts the rows that it was given."""
        return self._depth > 0

    @contextmanager
    def inside_experts(self) -> Iterator[None]:
        """Inside, one is."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @property
    def were_followed(self) -> bool:
        """Whether rows of the examples in order were met, which may have been sorted."""
        return bool(self._in_order)

    def order(self, tensor: Tensor, is_sorted: bool) -> Order | None:
        """Where the rows of the first example are, and those of the others; None where that is not known.

        Args:
            tensor: with n rows.
            is_sorted: whether it is asked of rows that are in order as well.
        """
        size, owners = self._batch_size, self.of(tensor)
        if size == 1:
            owners = torch.zeros(len(tensor), dtype=torch.long, device=tensor.device) if is_sorted else None
        if owners is None or len(owners) != len(tensor) or (self._are_in_order(owners) and not is_sorted):
            return None
        if owners not in self._orders:  # as they are of all that was computed from the same rows
            self._orders[owners] = Order.of(owners, size)
        found: Order = self._orders[owners]
        return found

    def of(self, tensor: Tensor) -> Tensor | None:
        """(n,) the example of each row, if that is known."""
        owners, version = self._owners.get(tensor, (None, 0))
        return owners if version == writes(tensor) else None

    def note(self, tensor: Tensor, owners: Tensor | None) -> None:
        """Whose its rows are, or that nobody knows."""
        if owners is None:
            self._owners.pop(tensor, None)
        elif tensor.shape[:1] == owners.shape or tensor.shape[:2] == (1, len(owners)):
            if owners.device != tensor.device:
                is_known = self._are_in_order(owners)
                owners = self.in_order(len(owners), tensor.device) if is_known else owners.to(tensor.device)
            self._owners[tensor] = owners, writes(tensor)
            if len(owners) % self._batch_size == 0 and not self._are_in_order(owners):
                self._noted.setdefault(len(owners), {})[id(owners)] = owners

    def note_made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, unseen: bool) -> None:
        """Takes note of what an operation of this name gave, which tells of rows; `unseen` as `RowNumbers` has it."""
        self._numbers.follow(name, args, kwargs, output, unseen)
        if name.removeprefix("new_").removesuffix("_like") in ("zeros", "empty", "ones", "full"):
            self._blank.update((one, writes(one)) for one in tensors_in(output))

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether it, or what it is a view of, was made to be written to, and nothing was since."""
        made = tensor if tensor._base is None else tensor._base
        return bool(self._blank.get(made, -1) == writes(made))

    def in_order(self, rows: int, device: torch.device) -> Tensor:
        """The owners of so many rows that lie in order."""
        if (rows, device) not in self._in_order:
            numbers = torch.arange(self._batch_size, device=device)
            self._in_order[rows, device] = numbers.repeat_interleave(rows // self._batch_size)
        return self._in_order[rows, device]

    def is_restored(self, tensor: Tensor) -> bool:
        """Whether its rows are known to lie in order."""
        owners = self.of(tensor)
        return owners is not None and self._are_in_order(owners)

    def followed(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        known: Known,
        enter: Callable[[Tensor], Tensor | None] | None = None,
        is_blank: bool = True,
        entered: Tensor | None = None,
    ) -> Tensor | list[Tensor] | None:
        """Those of what an operation gave, from what was `known` of its arguments before; a list, of several pieces.

        Args:
            enter: gives the owners of what rows are picked of, and nothing is known of.
            is_blank: whether there was no data in its first argument before.
            entered: the owners of that by `enter`, before anything was written.
        """
        name, source = picks.name_of(func), args[0] if args else None
        if name in picks.JOINING:
            return _joined(args, kwargs, known)
        if not isinstance(source, Tensor):
            return None
        before = known.get(id(source))
        if (write := picks.written(name, args, kwargs)) is not None:
            value = None if write.value is None else known.get(id(write.value))
            if before is None and is_blank and source.dim():
                return self._filled(write, source, value)
            return self._written(write, entered if before is None else before, value)
        pick = picks.picked(name, args, kwargs)
        are_pieces = name in picks.PIECES and axis_of(2, args, kwargs) == 0
        is_found = name in picks.FINDING and (name != "where" or len(args) + len(kwargs) == 1)
        if before is None and enter is not None and (pick is not None or are_pieces or is_found or name in _REPEATING):
            before = enter(source)
        if before is not None and len(before) != len(source) and name not in _VIEWS:  # (1, n, ...)
            return None
        if before is None and is_elementwise(name):
            before = next((owners for owners in known.values() if owners is not None), None)
        if before is None:
            return None
        if is_found:
            several = tensors_in(output)
            return [before[output[:, 0] if isinstance(output, Tensor) else several[0]]] * len(several)
        if pick is not None:
            return self._picked(pick, before, is_sorting=enter is None)
        if name == "__getitem__":
            return before if picks.keeps_first(args[1], source.dim()) else None
        if name in _REPEATING:
            return self._repeated(name, before, args[1:], kwargs)
        if name == "sort":
            return before[output[1]] if source.dim() == 1 else None
        if are_pieces:
            return list(before.split([len(piece) for piece in output]))
        if name in _VIEWS and isinstance(output, Tensor) and output.dim():
            return self._viewed(before, len(output))
        made, others = tensors_in(output), [a for a in tensors_in(args, kwargs) if known.get(id(a)) is not None]
        if not works_by_rows(name, args, kwargs) or not all(one.shape[:1] == before.shape for one in made):
            return None
        # What has fewer axes is not laid beside the first one.
        is_aligned = not keeps_axes(name) or len({a.dim() for a in (*made, *others)}) < 2
        if name == "where" and any(
            self._may_lie_otherwise(a, before) for a in tensors_in(args, kwargs) if known.get(id(a)) is None
        ):
            return None
        return before if is_aligned and all(_are_same(before, known[id(a)]) for a in others) else None

    def _picked(self, pick: picks.Pick, before: Tensor, is_sorting: bool) -> Tensor | None:
        """Of rows that were picked; where a module is `is_sorting` those of experts, all of them go back in the end."""
        owners: Tensor = before[pick.rows]
        if pick.are_numbers and not self._numbers.are_places(pick.rows, unseen=is_sorting):
            # What all go back by leaves no room for others.
            owners = self._sorted_back(owners)
            is_back = self._are_in_order(owners) and (is_sorting or not self._are_in_order(before))
            return owners if is_back else None
        # Of rows in order numbers may pick others in another micro-batch, and are none that put them back.
        may_be_back = pick.are_numbers and (is_sorting or not self._are_in_order(before))
        return self._sorted_back(owners) if may_be_back else owners

    def _filled(self, write: picks.Write, target: Tensor, value: Tensor | None) -> Tensor | None:
        """Of rows that were made to be written to."""
        places = torch.arange(len(target), device=target.device)
        rows = places[write.rows]
        is_matched = value is not None and value.shape == rows.shape
        several = len(rows.unique())
        if is_matched and several == len(places):  # all of them are written
            assert value is not None
            owners = torch.empty_like(places).index_copy_(0, rows, value)
            return self._sorted_back(owners) if torch.equal(owners[rows], value) else None
        # Those that are not lie as all others of as many do, which is not known where some were picked that do not.
        is_summed = is_matched and several < len(rows)
        if len(target) % self._batch_size or self._has_uneven(len(target), value if is_summed else None):
            return None
        before = self.in_order(len(target), target.device)
        return before if self._written(write, before, value) is before else None

    def _has_uneven(self, rows: int, besides: Tensor | None) -> bool:
        """Whether so many rows are known that do not lie in order, `besides` those that are added up."""
        found = [one for one in self._noted.get(rows, {}).values() if not _are_same(one, besides)]
        return not all(_are_same(one, self.in_order(rows, one.device)) for one in found)

    def _written(self, write: picks.Write, before: Tensor | None, value: Tensor | None) -> Tensor | None:
        """Of rows into which others were written, `value` being whose these are."""
        if value is None:  # a number, or the same for all rows
            is_same = write.value is None or (write.value.shape[:1].numel() == 1 and not write.value.requires_grad)
            return before if is_same else None
        if before is None:
            return None
        own = before[write.rows]
        if write.times > 1:
            value = value.repeat_interleave(write.times)[: len(own)]
        if _are_same(own, value):
            return before
        if write.is_partial or own.shape != value.shape:
            return None
        owners = before.clone()
        owners[write.rows] = value
        # Of two that are written into one place nobody knows which is left there.
        return self._sorted_back(owners) if torch.equal(owners[write.rows], value) else None

    def _sorted_back(self, owners: Tensor) -> Tensor:
        """The same, called what it is where all rows are in order."""
        if len(owners) % self._batch_size:
            return owners
        known = self.in_order(len(owners), owners.device)
        return known if torch.equal(owners, known) else owners

    def _viewed(self, before: Tensor, rows: int) -> Tensor | None:
        """Of the same numbers in longer rows, or in shorter ones."""
        if rows == len(before):
            return self._sorted_back(before) if rows == self._batch_size else before
        if self._are_in_order(before):
            return self.in_order(rows, before.device) if rows % self._batch_size == 0 else None
        if rows and rows % max(len(before), 1) == 0 and len(before):
            return before.repeat_interleave(rows // len(before))
        if not rows or not len(before) or len(before) % rows:
            return None
        pieces = before.view(rows, -1)
        return self._sorted_back(pieces[:, 0]) if bool((pieces == pieces[:, :1]).all()) else None

    def _repeated(self, name: str, before: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Of each row several: one after another, or all once more after all."""
        times = args[0] if args else kwargs.get("repeats")
        if name == "repeat_interleave":
            is_along = "dim" in kwargs or len(args) > 1
            if not is_along or axis_of(1, args, kwargs) != 0 or not isinstance(times, (int, Tensor)):
                return None
            owners = before.repeat_interleave(times)
            return self._sorted_back(owners) if isinstance(times, int) else owners
        sizes = times if isinstance(times, (tuple, list)) else args
        return before.repeat(sizes[0]) if sizes and isinstance(sizes[0], int) else None

    @staticmethod
    def _may_lie_otherwise(other: Tensor, before: Tensor) -> bool:
        """Whether these may be rows of other examples than those beside them, from which an operation may choose."""
        is_data = other.requires_grad and not isinstance(other, (nn.Parameter, WatchedParameter))
        return is_data and other.shape[:1] == before.shape and len(before) > 1

    def _are_in_order(self, owners: Tensor) -> bool:
        return owners is self._in_order.get((len(owners), owners.device))


def _are_same(first: Tensor, second: Tensor | None) -> bool:
    return first is second or (second is not None and torch.equal(first, second))


def _joined(args: tuple[Any, ...], kwargs: dict[str, Any], known: Known) -> Tensor | None:
    """Of rows one below another."""
    pieces: Sequence[Tensor] = args[0] if args else kwargs.get("tensors", ())
    owners = [known.get(id(one)) for one in pieces]
    axis, found = axis_of(1, args, kwargs), [one for one in owners if one is not None]
    if not found or len(found) != len(owners):
        return None
    if axis == 0:
        return torch.cat(found)
    return found[0] if axis % pieces[0].dim() and all(_are_same(found[0], one) for one in found) else None
