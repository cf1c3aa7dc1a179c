"""Whether a model picks rows: then how many of them are an example's follows from the data, and not from a shape.

Of B k rows each example has k where all that was done to a batch keeps every row: views, copies, and what works on one
row. In which order they lie preflight compares with the oracle: it is the same for all data. An operation that picks
rows along a first axis, or puts them elsewhere, ends that. Not all that do are known by name: numbers of rows are held
against those of positions besides (`reading.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.alone import Alone
from hf_dp.per_example.followed.axes import Axes, is_mask
from hf_dp.per_example.followed.copies import RowCopies
from hf_dp.per_example.followed.cut_rows import CutRows
from hf_dp.per_example.followed.operations import leads_alike
from hf_dp.per_example.followed.picking import (
    CHOOSING,
    JOINING,
    MAKING,
    MAY_PICK,
    NO_NUMBERS,
    STACKING,
    VIEWING,
    Operation,
)
from hf_dp.per_example.followed.reshaped import Reshaped
from hf_dp.per_example.followed.views import ThroughViews
from hf_dp.per_example.watched import WatchedParameter, flatten, tensors_in


class Picked(TorchFunctionMode):
    """Follows the data of one forward pass.

    Args:
        batch: its tensors, of `batch_size` examples, B.
        images: for how many, several of each, there is room: what becomes of those not there is asked elsewhere.
        inferred: as `RowCopies` has it.
    """

    def __init__(self, batch: Iterable[Tensor], batch_size: int, images: int = 0, inferred: Any = None) -> None:
        super().__init__()
        self._data: Any = WeakIdKeyDictionary()
        self._data.update((tensor, None) for tensor in batch)
        # What follows from rows that were picked, by which operation; and of B rows whether row i was of example i.
        self._picked: Any = WeakIdKeyDictionary()
        self._one_of_each: Any = WeakIdKeyDictionary()
        # Of other numbers of rows, as they were picked, whether they are as many of each, in order.
        self._are_even: Any = WeakIdKeyDictionary()
        # What follows from rows that were picked, be they as many of each or not.
        self._indexed: Any = WeakIdKeyDictionary()
        # All numbers of examples, in order, as a model counted them: which version; and what was picked by them.
        self._counted: Any = WeakIdKeyDictionary()
        self._taken: Any = WeakIdKeyDictionary()
        # Of what the operation at hand was given, for what is computed on the way to its result.
        self._within: tuple[str | None, bool | None, int | None] = None, None, None
        self._batch_size, self._images = batch_size, images
        self.through, self.alone = ThroughViews(batch_size), Alone(batch_size)
        self.axes, self.copies = Axes(batch_size, self._data), RowCopies(set() if inferred is None else inferred)
        self._owners, self.reshaped = CutRows(batch_size, self.axes), Reshaped(batch_size)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Most that it is asked for is a tensor's shape and the like, and what follows would ask for some itself.
        if func in NO_NUMBERS:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        given = tensors_in(args, kwargs)
        with torch._C.DisableTorchFunction():
            met = given if len(self._one_of_each) or self.through.were_any else []
            known = [is_one for a in met if (is_one := self._is_one(a)) is not None]
            by = next((found for a in given if (found := self._picked_by(a))), None) if len(self._picked) else None
            self.copies.meet(given, known, by)
            is_new = self.alone.writes(func) and not any(map(self.is_data, tensors_in(args[:1]) or given[:1]))
        own = self.alone.one_of(filter(self.is_data, given))
        before, self._within = self._within, (by, all(known) if known else None, own)
        try:
            output = func(*args, **kwargs)
            pieces = list(output) if func is Tensor.__iter__ else output
        finally:
            self._within = before
        with torch._C.DisableTorchFunction():
            self.copies.follow(given, output, self.is_data)
            if func is torch.arange and args == (self._batch_size,) and not kwargs.keys() - {"device", "dtype"}:
                self._counted.update(() if output.is_inference() else ((output, output._version),))
            if data := [one for one in given if self.is_data(one)]:
                op = Operation.of(func, args, kwargs, pieces)
                moved = self.reshaped.follow(op, data, self._is_in_order, by is None and all(known))
                for one in (made for made in tensors_in(output) if id(made) in moved):
                    self.axes.note(one, moved[id(one)], op.source is not None and self.axes.is_sure(op.source))
                self._follow(op, given, data, known, by)
                self._follow_alone(op, data, is_new)
        return iter(pieces) if func is Tensor.__iter__ else output

    def _follow_alone(self, op: Operation, data: list[Tensor], is_new: bool) -> None:
        """Notes what becomes of what one example has, and whether a loop in Python has put it in order again."""
        for one, is_each, is_own in self.alone.follow(op, data, self.axes, self._may_lead, is_new):
            if one.dtype == torch.bool:  # a mask hides, and has no rows
                continue
            known = self._one_of_each if is_each or not is_own else self._are_even
            # Of pieces of one example each it makes no difference which of their own rows these are.
            known[one] = is_own and ((is_each and one is op.output) or known.get(one, True))

    def _is_one(self, tensor: Tensor) -> bool | None:
        written = self.through.is_one_of_each(tensor)
        return written if written is False else self._one_of_each.get(tensor, written)

    def _is_in_order(self, source: Tensor) -> bool:
        """Whether B rows are one of each example, in order, as far as anything was picked."""
        is_one = self._is_one(source)
        is_known = is_one or (is_one is None and self._picked_by(source) is None)
        return is_known and self.is_data(source) and not self.axes.of(source) and not self.alone.is_of_one(source)

    def _may_lead(self, tensor: Tensor) -> bool:
        return self._is_one(tensor) is not False

    def _follow(
        self, op: Operation, given: list[Tensor], data: list[Tensor], known: list[bool], by: str | None
    ) -> None:
        """Notes what becomes of `data`, from what was known of all that was `given`."""
        self.axes.follow(data, made := tensors_in(op.output), functools.partial(leads_alike, op))
        self.axes.follow_unclear(data, made, op.name in JOINING or op.name in STACKING)
        if op.name in MAKING:
            return
        if op.name.startswith("_foreach") and op.name.endswith("_"):  # which writes into several
            self._one_of_each.update((one, False) for one in given)
            return
        written = [one._base for one in made if one._base is not None] + given[: op.is_in_place]
        self._data.update((one, None) for one in (*made, *written))
        # Masks hide, and are no rows: those of attention are looked up by rows in every model.
        rows = [one for one in made if one.dtype != torch.bool]
        if op.name == "stack":
            self.axes.stacked(data, made[0], op.kwargs.get("dim", op.args[1] if len(op.args) > 1 else 0))
        table = next((a for a in given if a.is_floating_point()), None)
        if op.name == "embedding" and table is not None and self.is_data(table) and table.dim() == 2:
            op, given = op.as_of_rows(), [table]
        name, is_written = op.name, op.is_written
        changed = given[:1] if op.is_in_place else rows if is_written or name in MAY_PICK else []
        picks = bool(changed) and self._picks(op)
        axis = self._owners.axis(op) if changed else 0
        picks_other = axis > 0 and self._picks(op, axis)
        # As many are left there, and what is no data moves none of them.
        picks_other &= not is_written or any(a.is_floating_point() and self.is_data(a) for a in given[1:])
        if not is_written or not (picks or picks_other):
            found = self.through.written(op, by, any(a in self._indexed for a in given))
            self._one_of_each.update((one, is_one and self._one_of_each.get(one, True)) for one, is_one in found)
        if axis and name in JOINING and not picks_other:
            self.axes.note(made[0], axis, all(map(self.axes.is_sure, data)))
        in_one_row = bool(changed) and not (picks or picks_other) and self._picks_in_one_row(op)
        if picks or picks_other or any(a in self._indexed for a in given):
            self._indexed.update((one, None) for one in (*rows, *changed))
        if picks and not axis:
            self._owners.cut(op, 0, self._may_lead)
        elif len(self._owners) and not picks and not picks_other:
            self._owners.keep(op, data)
        if picks:
            if any(one.dim() and len(one) != self._batch_size for one in changed):
                is_even = not is_written and op.source not in self._picked and op.is_even(self._batch_size)
                self._are_even.update((one, is_even) for one in (*rows, *changed))
                # Of a mask's as many of each now need not be as many of each later.
                if not is_even or any(map(is_mask, flatten(op.args[1:]))):
                    by = by or name.strip("_")
                    rows = rows if not is_written else [*rows, *changed]
            elif axis:  # which the other ones of the examples may leave as it is
                if not picks_other and any(self.axes.of(one) != axis for one in rows):
                    known = [self._owners.along(op, axis, self._may_lead) is True, *known]
            elif not is_written and name not in JOINING:
                # From what the numbers follow by which they were picked makes no difference to which they are.
                is_one = self._is_one_of_each(op)
                known = [self._one_of_each.get(given[0], True) and is_one]
            elif name in JOINING and all(one in self._owners for one in given):
                known = [self._owners.are_whole(given)]
        elif name in VIEWING and (is_even := self._are_even.get(given[0])) is not None:
            known += [is_even] * (len(made) == 1 and made[0].shape[:1] == (self._batch_size,))
        if picks_other:
            is_whole = (self._owners.put if is_written else self._owners.along)(op, axis, self._may_lead)
            by = by or (name if is_whole is None and not is_written else None)
            if is_whole is not None:
                known = [self._one_of_each.get(given[0], True) and is_whole]
                self._one_of_each.update((one, known[0]) for one in changed if is_written)
        known += op.found_one_of_each(self._batch_size)
        if in_one_row:  # whose the numbers are that are left, or put elsewhere, nobody knows
            known = [False, *known]
            self._one_of_each.update((one, False) for one in (*changed, *written))
        writes = is_written or self.alone.writes(op.func)
        is_alone = writes and bool(op.args) and isinstance(op.args[-1], Tensor) and self.alone.is_alone(op.args[-1])
        is_put = self._owners.put(op, 0, self._may_lead) if picks and is_written and not axis else None
        if is_put is not None:
            self._one_of_each.update((one, is_put and self._one_of_each.get(one, True)) for one in (*changed, *rows))
            known = [is_put, *known]
        elif is_written and not axis and not is_alone and (value := op.args[-1]) in self._one_of_each:
            known_of = self._one_of_each[value]
            self._one_of_each.update((one, known_of) for one in changed if len(one) == self._batch_size)
        if by is not None:
            is_filled = op.name == "__setitem__" and not picks and len(given[0]) != self._batch_size
            self._picked.update((one, by) for one in (*rows, *given[:is_filled]))
        if writes and self.alone.writes(op.func) and given[0].dtype != torch.bool:
            # What is no data is nobody's, wherever it comes to.
            is_open = is_written and (picks or picks_other) and not is_put and given[0]._base is not None
            is_open &= any(a.is_floating_point() and self.is_data(a) for a in given[1:])
            is_wrong = is_open or not all(known) or self._one_of_each.get(given[0]) is False
            self.through.doubt(op, is_wrong and not is_alone)
            if any(a in self._indexed for a in given):
                self.through.note(given[0])
        if known:
            self._one_of_each.update((one, all(known)) for one in made if one.dtype != torch.bool)

    def is_data(self, tensor: Tensor) -> bool:
        """Whether it was computed from the batch."""
        if tensor in self._data:
            return True
        return tensor.requires_grad and not isinstance(tensor, (nn.Parameter, WatchedParameter))

    def picked_by(self, tensor: Tensor) -> str | None:
        """Which operation picked rows that `tensor` was computed from; None if none did."""
        return self._picked_by(tensor) or (None if tensor in self._data else self._within[0])

    def _picked_by(self, tensor: Tensor) -> str | None:
        return self._picked.get(tensor) or self.through.of(tensor) or None

    def forget(self, tensor: Tensor) -> None:
        """Takes note that its rows are as many of each, in order, however they came there."""
        self.through.forget(tensor)
        self.axes.note_whole(tensor)
        for known in (self._picked, self._one_of_each, self._are_even, self._indexed, self._owners):
            known.pop(tensor, None)

    def example_of(self, tensor: Tensor) -> int | None:
        """The example that it follows from alone, where operations tell so, whatever sizes there are."""
        found = self.alone.surely(tensor)
        return self._within[2] if found is None and tensor not in self._data else found

    def doubt(self, tensor: Tensor) -> None:
        """Takes note that nobody knows whose its rows are."""
        self._one_of_each[tensor] = False

    def are_images(self, source: Tensor) -> bool:
        """Whether it has all that there is room for."""
        return 0 < self._images == len(source) and source.dim() > 2 and not source.requires_grad

    def takes_each(self, tensor: Tensor) -> bool:
        """Whether it was picked by the numbers of all examples, in order, as the model counted them."""
        return tensor in self._taken

    def follows_index(self, tensor: Tensor) -> bool:
        """Whether it was computed from rows that were picked, be they as many of each."""
        return tensor in self._indexed

    def has_one_of_each(self, tensor: Tensor, axis: int = 0) -> bool | None:
        """Of B rows, or (B, k), that follow from picked ones, whether row i was example i's; None of anything else.

        Its examples are known to lie along `axis`, if that is given.
        """
        if axis:
            self.axes.note(tensor, axis)
        if self.alone.is_of_one(tensor):
            return False
        found = self._is_one(tensor)
        return self._within[1] if found is None and tensor not in self._data else found

    def _picks(self, op: Operation, axis: int = 0) -> bool:
        """Whether an operation picks rows of data along an axis, or writes some."""
        source = op.rows_source
        if source is None or isinstance(op.picked_of[0], WatchedParameter) or self.are_images(source):
            return False
        return op.picks(source, axis, self.is_data, is_turned=axis == self.axes.of(source))

    def _picks_in_one_row(self, op: Operation) -> bool:
        """Whether it picks, or writes, some of what all examples have beside one another."""
        axis = self.axes.in_one_row(source := op.rows_source)
        return (
            axis > 0
            and source is not None
            and not self.alone.is_alone(source)
            and op.picks(source, axis, self.is_data, True)
        )

    def _is_one_of_each(self, op: Operation) -> bool:
        """Whether the B rows that an operation picks of B k are one of each example, in order."""
        source, size = op.source, self._batch_size
        if op.name == "as_strided":  # windows within rows, as its numbers say, which preflight has compared
            return source is not None and len(source) == size
        # Of rows of which nobody knows whose they are.
        if op.name not in CHOOSING or source is None or (len(source) != size and source in self._picked):
            return False
        rows = op.numbers_of_each if len(source) == size else None
        if is_counted := rows is not None and self._counted.get(rows) == rows._version:
            self._taken.update((one, None) for one in tensors_in(op.output))
        return is_counted or op.picks_one_of_each(size)
