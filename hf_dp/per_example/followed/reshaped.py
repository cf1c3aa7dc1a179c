"""Which tensors hold the numbers of one example after those of another, whatever was done to their shapes.

Along the first axis of (B, ...) they lie so. A new shape leaves the order of all numbers as it is, what changes places
of axes takes that of the examples along, and what is cut of other axes leaves as many of each example. So does what
works on each of such rows by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.numbers import writes
from hf_dp.per_example.followed.operations import leads_alike
from hf_dp.per_example.followed.picking import CATS, Operation
from hf_dp.per_example.watched import tensors_in

_RESHAPING = frozenset(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "contiguous", "clone"))
_SWAPPING, _MOVING = ("transpose", "swapaxes", "swapdims"), ("movedim", "moveaxis")
# Where the axis is that they cut, or take out.
_CUTTING = {"chunk": 2, "split": 2, "narrow": 1, "select": 1, "unbind": 1}


class Reshaped:
    """Follows them through one pass over so many examples."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        # Along which axis the examples lie, each with as many rows there; and torch's count of writes then.
        self._known: Any = WeakIdKeyDictionary()

    def follow(
        self, op: Operation, data: list[Tensor], is_in_order: Callable[[Tensor], bool], is_unpicked: bool
    ) -> dict[int, int]:
        """Notes what becomes of the first argument, or of what is joined.

        Args:
            data: those of its arguments that anything of the batch is in.
            is_in_order: whether something with a row for each example is known to have them in order.
            is_unpicked: whether no argument has rows that were picked.

        Returns:
            Of what was made, by its identity, along which axis the examples lie.
        """
        source, others = op.source, dict[int, int]()
        if op.name in CATS and data and is_unpicked:
            return self._joined(op, data, is_in_order)
        if source is None or op.is_in_place:
            return others
        leads = source.shape[:1] == (self._batch_size,) and is_in_order(source)
        axis = 0 if leads else self._axis_of(source)
        if axis is None:
            return others
        for made in (one for one in tensors_in(op.output) if is_unpicked and not leads):
            is_as_long = made is not source and made.shape[: axis + 1] == source.shape[: axis + 1]
            if is_as_long and leads_alike(op, source, axis, made):
                self._known[made] = axis, writes(made)
                others[id(made)] = axis
        for made in tensors_in(op.output):
            found = self._followed(op, source, made, axis)
            if found is not None and made.dim() and made is not source:
                self._known[made] = found, writes(made)
                others[id(made)] = found
        return others

    def _joined(self, op: Operation, data: list[Tensor], is_in_order: Callable[[Tensor], bool]) -> dict[int, int]:
        """Of pieces that lie beside one another: each along the same axis as the others."""
        made, along = op.output, op.axis_at(1)
        axes = {0 if len(one) == self._batch_size and is_in_order(one) else self._axis_of(one) for one in data}
        axis = axes.pop()
        is_known = axis is not None and not axes and isinstance(along, int) and along % made.dim() != axis
        if axis is None or not is_known or any(one.dim() != made.dim() for one in data):
            return {}
        self._known[made] = axis, writes(made)
        return {id(made): axis}

    def has(self, tensor: Tensor) -> bool:
        """Whether its rows are as many of each example, in order; of what was written to since nobody knows."""
        return self._axis_of(tensor) == 0

    def _axis_of(self, tensor: Tensor) -> int | None:
        axis, version = self._known.get(tensor, (None, 0))
        return axis if version == writes(tensor) else None

    def _followed(self, op: Operation, source: Tensor, made: Tensor, axis: int) -> int | None:
        """Along which axis of what is `made` the examples lie."""
        name = op.name
        if name in _RESHAPING:
            before = source.shape[:axis].numel()
            places = [i for i in range(made.dim()) if prod(made.shape[:i]) == before]
            return next((i for i in places if made.shape[i] and made.shape[i] % self._batch_size == 0), None)
        if op.kwargs and name not in _CUTTING:
            return None
        if name in _CUTTING:
            cut = op.axis_at(_CUTTING[name])
            if not isinstance(cut, int) or cut % source.dim() == axis:
                return None
            return axis - (name in ("select", "unbind") and cut % source.dim() < axis)
        if name == "__getitem__":
            return _after_index(op.args[1], source.dim(), axis)
        order = _order(name, op.args[1:], source.dim())
        return None if order is None else order.index(axis)


def _order(name: str, args: Sequence[Any], dimensions: int) -> list[int] | None:
    """Which axes lie where others were."""
    if name == "permute":
        given = args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args
        return [axis % dimensions for axis in given]
    if name not in (*_SWAPPING, *_MOVING) or len(args) != 2 or not all(isinstance(one, int) for one in args):
        return None
    first, second = (axis % dimensions for axis in args)
    order = list(range(dimensions))
    if name in _SWAPPING:
        order[first], order[second] = second, first
    else:
        order.insert(second, order.pop(first))
    return order


def _after_index(index: Any, dimensions: int, axis: int) -> int | None:
    """Where an axis is once others were cut, or taken out."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool)) for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (dimensions - len(parts) + 1)
    parts += [slice(None)] * (dimensions - len(parts))
    return axis - sum(isinstance(part, int) for part in parts[:axis]) if parts[axis] == slice(None) else None
