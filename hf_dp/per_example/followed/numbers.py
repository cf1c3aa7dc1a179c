"""Which numbers of rows are places: each of a row that is meant, and none that stands for no row.

What fills up a list of numbers (zeros, say) picks rows of some example, whose they are then said to be; but what is
computed of them goes to whoever had too few. Numbers that a search or an order gave are all meant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.axes import is_mask
from hf_dp.per_example.followed.picking import CATS, Operation
from hf_dp.per_example.watched import tensors_in

_FOUND = ("argsort", "arange", "randperm")
# Of several results the second one.
_WITH_ORDER = ("sort", "topk")
# What keeps numbers as they are, or leaves some out.
_KEEPING = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone", "detach", "t", "ravel"),
    *("to", "long", "int", "cpu", "cuda", "expand", "repeat_interleave", "repeat", "flip", "unbind", "split", "chunk"),
    *("tensor_split", "transpose", "permute", "masked_select", "unique", "narrow", "select", "roll"),
)
_PICKING = ("__getitem__", "index_select")
# What moves all numbers alike, and what goes from copies of rows to the rows.
_COUNTING = (
    *("add", "__add__", "__radd__", "sub", "__sub__", "mul", "__mul__", "__rmul__", "add_", "__iadd__"),
    *("div", "floor_divide", "__floordiv__", "remainder", "__mod__", "fmod"),
)


class RowNumbers:
    """Follows numbers of rows."""

    def __init__(self) -> None:
        # Whether they are places, and torch's count of writes to them then.
        self._known: Any = WeakIdKeyDictionary()

    def follow(self, op: Operation, unseen: bool) -> None:
        """Notes what an operation gave; `unseen` as `are_places` has it."""
        for place, made in enumerate(tensors_in(op.output)):
            if made.dtype in (torch.int64, torch.int32):
                self._known[made] = writes(made), self._gives_places(op, place, unseen)

    def are_places(self, index: Any, unseen: bool) -> bool:
        """Whether numbers are; `unseen` of those which no operation gave that was followed."""
        count, are_places = self._known.get(index, (None, unseen))
        is_same = count is None or count == writes(index)
        return are_places and is_same

    def _gives_places(self, op: Operation, place: int, unseen: bool) -> bool:
        name, args, kwargs = op.name, op.args, op.kwargs
        if name in _FOUND or op.is_search:
            return True
        if name in _WITH_ORDER:
            return place == 1
        others = [one for one in tensors_in(args[1:], kwargs) if not is_mask(one)]
        if name in CATS or name == "stack":
            return all(self.are_places(one, unseen) for one in tensors_in(args))
        if name in _COUNTING or name in _PICKING:
            of = [*tensors_in(args[:1]), *others]
            return bool(of) and all(self.are_places(one, unseen) for one in of)
        return name in _KEEPING and self.are_places(args[0], unseen)


def writes(tensor: Tensor) -> int:
    """Torch's count of writes to a tensor."""
    return 0 if tensor.is_inference() else tensor._version
