"""Which axis of a tensor leads through the examples, where a model has put it elsewhere: time first, say.

Followed by what tensors are, and not by names of operations: of a view the axis has the same size and the same stride,
and of anything else it is where it was, if all axes before it are as long. Only of what is stacked it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Where the arguments of what works along one axis have that axis, and which it is where they leave it out; () of what
# knows no axis.
Place = tuple[int, int | None] | tuple[()]
# Whether the axes of what an operation was given, up to one of them, are the first ones of what it made.
Keeps = Callable[[Tensor, int, Tensor], bool]


class Axes:
    """Of the data of one forward pass, the axis of the examples if it is not the first.

    Args:
        batch_size: B.
        batch: its tensors.
    """

    def __init__(self, batch_size: int, batch: Iterable[Tensor] = ()) -> None:
        self._batch_size = batch_size
        # None of what is of some examples alone, whose sizes tell nothing.
        self._axes: Any = WeakIdKeyDictionary()
        # Of which all operations tell that, from the batch on. Sizes are others in other micro-batches.
        self._sure: Any = WeakIdKeyDictionary()
        self._sure.update((one, None) for one in batch)
        # What got another axis, of as many, before that of the examples maybe.
        self._unclear: Any = WeakIdKeyDictionary()

    def of(self, tensor: Tensor) -> int:
        """The second where nothing is known, and sizes leave no other."""
        size = self._batch_size
        is_second = tensor.dim() > 1 and bool(len(tensor) % size) and tensor.shape[1] == size
        return int(self._axes.get(tensor, int(is_second)) or 0)

    def may_lead(self, tensor: Tensor) -> bool:
        """Whether its size leaves an axis to all examples."""
        return tensor.dim() > 0 and self.may_lead_along(tensor, self.of(tensor))

    def may_lead_along(self, tensor: Tensor, axis: int) -> bool:
        """The same of an axis."""
        return not self._is_part(tensor) and not tensor.shape[axis] % self._batch_size

    def in_one_row(self, tensor: Tensor | None) -> int:
        """The axis along which all examples may lie beside one another, in one row; 0 if there are more rows."""
        if tensor is None or self._batch_size == 1 or tensor.shape[:1] != (1,):
            return 0
        axis = next((k for k, n in enumerate(tensor.shape) if n > 1), 0)
        return axis if self.may_lead_along(tensor, axis) else 0

    def note(self, tensor: Tensor, axis: int, sure: bool = True) -> None:
        """Takes note that the examples lie there; whether more than sizes tells so."""
        self._axes[tensor] = axis
        self._note_sure(tensor, sure)

    def follow(self, given: Sequence[Tensor], made: Iterable[Tensor], keeps: Keeps = lambda *_: False) -> None:
        """Notes of what an operation, which `keeps` axes, `made` where the axis is that it had in data which was
        `given`."""
        made = list(made)
        for one in (one for one in made if any(one is a for a in given)):  # its axes may have been turned in place
            self._note_sure(one, self.is_sure(one) and keeps(one, self.of(one), one))
        known = [(one, axis) for one in given if (axis := self._known(one)) is not None]
        if not known and any(self._is_part(one) for one in given):
            self._axes.update((one, None) for one in made)
            return
        is_first = not any(axis for _, axis in known)
        for one in made:
            if sure := [k for s, axis in known if (k := self._surely_after(s, axis, one, keeps)) is not None]:
                self.note(one, max(sure))
            if one in self._sure or (is_first and one._base is None):
                continue
            found = [k for source, axis in known if (k := self._after(source, axis, one)) is not None]
            if any(found):
                self._axes[one] = max(found)
            elif any(self._is_left_out(source, axis, one) for source, axis in known):
                self._axes[one] = None

    def is_across(self, tensor: Tensor) -> bool:
        """Whether the examples lie along the second axis, whatever sizes there are."""
        return bool(self._axes.get(tensor) == 1) and tensor.shape[1:2] == (self._batch_size,) and self.is_sure(tensor)

    def is_sure(self, tensor: Tensor) -> bool:
        """Whether more than sizes tells which axis it is."""
        return tensor in self._sure

    def _note_sure(self, tensor: Tensor, sure: bool) -> None:
        if sure:
            self._sure[tensor] = None
        else:
            self._sure.pop(tensor, None)

    def _surely_after(self, source: Tensor, axis: int, made: Tensor, keeps: Keeps) -> int | None:
        if not self.is_sure(source):
            return None
        if made is not source and _is_view(made, source):
            return self._after(source, axis, made)
        return axis if made.shape[: axis + 1] == source.shape[: axis + 1] and keeps(source, axis, made) else None

    def follow_unclear(self, given: Sequence[Tensor], made: Iterable[Tensor], is_joined: bool) -> None:
        """Notes what an operation `made`, that `is_joined` of pieces or not, of which nobody knows which axis leads."""
        size = self._batch_size
        if not (square := [one for one in made if one.dim() > 1 and len(one) == size == one.shape[1]]):
            return
        are_unclear = any(a in self._unclear for a in given)
        is_new = not is_joined and not any(map(self._is_part, given))
        for one in square:
            is_longer = one._base is None and all(one.shape[: a.dim()] != a.shape for a in given if a.dim())
            is_wider = one.dim() > max((a.dim() for a in given), default=0) or any(a.shape[:1] == (1,) for a in given)
            if are_unclear or (is_new and is_longer and is_wider):
                self._unclear[one] = None

    def is_unclear(self, tensor: Tensor) -> bool:
        """Whether both the first and the second axis may be that of the examples."""
        return tensor in self._unclear and not self._axes.get(tensor)

    def note_whole(self, tensor: Tensor) -> None:
        """Takes note that all examples are in what was made of parts."""
        if self._is_part(tensor):
            self._axes.pop(tensor)

    def stacked(self, pieces: Sequence[Tensor], made: Tensor, new: int) -> None:
        """Notes where the axis of `pieces` is once they are stacked along a `new` one."""
        axes = {self._known(one) for one in pieces}
        if len(axes) == 1 and (axis := axes.pop()) is not None:
            self.note(made, axis + (new % made.dim() <= axis), all(map(self.is_sure, pieces)))

    def _is_part(self, tensor: Tensor) -> bool:
        return self._axes.get(tensor, 0) is None

    def _known(self, tensor: Tensor) -> int | None:
        axis = self.of(tensor)
        is_whole = tensor.dim() > 0 and tensor.shape[axis] == self._batch_size and not self._is_part(tensor)
        return axis if is_whole else None

    def _places(self, source: Tensor, axis: int, view: Tensor) -> list[int]:
        strides = zip(view.shape, view.stride(), strict=True)
        return [k for k, each in enumerate(strides) if each == (self._batch_size, source.stride(axis))]

    def _is_left_out(self, source: Tensor, axis: int, made: Tensor) -> bool:
        is_smaller = _is_view(made, source) and made.numel() < source.numel()
        return is_smaller and not self._places(source, axis, made)

    def _after(self, source: Tensor, axis: int, made: Tensor) -> int | None:
        if _is_view(made, source):
            places = self._places(source, axis, made)
            return places[0] if len(places) == 1 else None
        is_same = made.shape[: axis + 1] == source.shape[: axis + 1]
        # With fewer axes another one may have come there.
        is_clear = made.dim() == source.dim() or list(made.shape).count(self._batch_size) == 1
        return axis if is_same and is_clear else None


def _is_view(made: Tensor, source: Tensor) -> bool:
    return made._base is not None and (made._base is source or made._base is source._base)


def in_order(owners: Tensor, batch_size: int) -> int | None:
    """The axis along which these numbers of examples are one of each, in order."""
    for axis in (k for k, n in enumerate(owners.shape) if n == batch_size):
        expected = torch.arange(batch_size, device=owners.device).view(-1, *[1] * (owners.dim() - axis - 1))
        if bool((owners == expected).all()):
            return axis
    return None


def numbers_of(source: Tensor, axis: int, batch_size: int) -> Tensor:
    """Whose each number of `source` is, where as many of each lie in order along an axis."""
    numbers = torch.arange(batch_size, device=source.device).repeat_interleave(source.shape[axis] // batch_size)
    return numbers.view(-1, *[1] * (source.dim() - axis - 1)).expand(source.shape)


def are_put_back(
    function: Any, args: Sequence[Any], axis: int, batch_size: int, first: int, rows: Tensor | None
) -> bool:
    """Whether a function that writes its last argument into its first, along an axis, puts each row to its example's.

    Args:
        first: where the rows lie in what is written.
        rows: whose they are; None of one of each, in order.
    """
    value, rows = args[-1], torch.arange(batch_size, device=args[-1].device) if rows is None else rows
    numbers = rows.view(-1, *[1] * (value.dim() - first - 1)).expand(value.shape)
    target = numbers_of(args[0], axis, batch_size).clone()
    placed = function(target, *args[1:-1], numbers)
    return in_order(target if placed is None else placed, batch_size) == axis


def are_put_to_own(name: str, args: Sequence[Any], rows: Tensor) -> bool | None:
    """Whether rows, whose they are, are written or added along the first axis where their own examples' is; None where
    it is not read."""
    index = args[1] if name in ("__setitem__", "index_put", "index_put_") else args[2] if len(args) > 3 else None
    index = index[0] if isinstance(index, tuple) and index else index
    index = torch.tensor(index, device=rows.device) if isinstance(index, list) else index
    if not isinstance(index, Tensor) or is_mask(index) or not index.dim() or len(index) > len(rows):
        return None
    return bool((index == rows[: len(index)].view(-1, *[1] * (index.dim() - 1))).all())


def are_even(source: Tensor, parts: Sequence[Tensor], batch_size: int) -> bool:
    """Whether the rows that an index of these `parts` picks, of as many of each example, are as many of each, in
    order."""
    each, axes = len(source) // batch_size, sum(part.dim() if is_mask(part) else 1 for part in parts)
    owners = torch.arange(batch_size, device=source.device).repeat_interleave(each)
    found = owners.view(-1, *[1] * (axes - 1)).expand(source.shape[:axes])[tuple(parts)].reshape(-1)
    return len(found) % batch_size == 0 and torch.equal(
        found, owners[:: max(each, 1)].repeat_interleave(len(found) // batch_size)
    )


def is_along(place: Place, args: Sequence[Any], kwargs: Any, source: Tensor, axis: int = 0) -> bool:
    """Whether an operation works along an axis, among others maybe."""
    if not place:
        return True
    position, default = place
    # It is a `dimension` of `Tensor.unfold`.
    found = next((kwargs[n] for n in ("dim", "axis", "dims", "dimension") if n in kwargs), None)
    if found is None:
        found = args[position] if len(args) > position else default
    several = found if isinstance(found, (tuple, list)) else [found]
    return any(not isinstance(one, int) or one % source.dim() == axis for one in several)


def is_indexed(source: Tensor, index: Any, axis: int = 0) -> bool:
    """Whether an index picks some rows along an axis, other than a single one."""
    part = part_along(source, index, axis)
    if isinstance(part, bool) or (is_mask(part) and not part.dim()):
        return True
    if isinstance(part, slice):
        return part.indices(source.shape[axis]) != (0, source.shape[axis], 1)
    is_number = isinstance(part, Tensor) and part.dim() == 0
    return not (is_number or isinstance(part, int))


def part_along(source: Tensor, index: Any, axis: int = 0) -> Any:
    """The part of an index that picks along an axis; True where one is no part of any, but a yes or no."""
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
    if any(isinstance(part, bool) or (is_mask(part) and not part.dim()) for part in parts):
        return True
    if any(part is Ellipsis for part in parts):
        at = next(k for k, part in enumerate(parts) if part is Ellipsis)
        left = source.dim() - sum(map(_axes_of, parts[:at] + parts[at + 1 :]))
        parts[at : at + 1] = [slice(None)] * left
    before = 0
    for part in parts:
        if before + _axes_of(part) > axis:
            return part
        before += _axes_of(part)
    return slice(None)


def _axes_of(part: Any) -> int:
    return part.dim() if is_mask(part) else 1


def is_mask(part: Any) -> bool:
    """Whether an index is one of yes and no."""
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def is_plainly_folded(given: Tensor, batch_size: int) -> bool:
    """Whether `given` is a plain view of a tensor (B, ...) whose examples lie one after another in memory."""
    return _is_plain(given, batch_size) and len(given) % batch_size == 0


def is_cut_across(given: Tensor, batch_size: int) -> bool:
    """Whether it is such a view, but that its rows are of parts of examples, or of several."""
    return _is_plain(given, batch_size) and len(given) % batch_size != 0


def _is_plain(given: Tensor, batch_size: int) -> bool:
    base = given._base
    return (
        base is not None
        and given.dim() > 0
        and base.shape[:1] == (batch_size,)
        and base.stride(0) * batch_size == base.numel() == given.numel()
        and base.storage_offset() == given.storage_offset()
        and given.is_contiguous()
    )
