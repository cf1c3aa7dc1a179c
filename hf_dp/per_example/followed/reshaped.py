"""Which tensors hold the numbers of one example after those of another, whatever was done to their shapes.

Of (B, ...) they lie so, and a new shape leaves the order of all numbers as it is. What changes places of other axes
than the first, whose rows are as many of each example, moves numbers within these alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.numbers import writes
from hf_dp.per_example.followed.picking import Operation

_RESHAPING = frozenset(("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "contiguous", "clone"))
_TURNING = {"transpose": 2, "swapaxes": 2, "swapdims": 2, "permute": 0, "movedim": 2, "moveaxis": 2}


class Reshaped:
    """Follows them through one pass over so many examples."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def follow(self, op: Operation, is_in_order: bool) -> None:
        """Notes what becomes of the first argument.

        Args:
            is_in_order: whether that, if it has a row for each example, is known to have them in order.
        """
        source, made = op.source, op.output
        if source is None or not isinstance(made, Tensor) or not made.dim() or op.is_in_place:
            return
        leads = is_in_order and source.shape[:1] == (self._batch_size,)
        if (leads or self.has(source)) and (op.name in _RESHAPING or _keeps_first(op, source)):
            self._known[made] = writes(made)

    def has(self, tensor: Tensor) -> bool:
        """Whether its rows are as many of each example, in order; of what was written to since nobody knows."""
        return bool(self._known.get(tensor, -1) == writes(tensor)) and len(tensor) % self._batch_size == 0


def _keeps_first(op: Operation, source: Tensor) -> bool:
    """Whether an operation changes places of other axes than the first, if it changes any."""
    several = _TURNING.get(op.name)
    if several is None or op.kwargs:
        return False
    axes = list(op.args[1:])
    if several == 0:
        places: Sequence[int] = axes[0] if len(axes) == 1 and isinstance(axes[0], Sequence) else axes
        return len(places) == source.dim() and places[0] % source.dim() == 0
    return len(axes) == several and all(isinstance(axis, int) and axis % source.dim() for axis in axes)
