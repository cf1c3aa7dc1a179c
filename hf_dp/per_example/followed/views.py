"""Rows that are written through a view change what it is a view of, and all other views of that."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_dp.per_example.followed.picking import Operation
from hf_dp.per_example.watched import tensors_in

# What gives its argument itself where that is so already.
_SO_ALREADY = (
    "to",
    "contiguous",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "cpu",
    "cuda",
)


class ThroughViews:
    """Follows picked rows that are written, all of them, into a view.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int) -> None:
        self._by: Any = WeakIdKeyDictionary()
        self._doubted: Any = WeakIdKeyDictionary()
        self._newly: Tensor | None = None
        self._batch_size = batch_size

    def written(self, op: Operation, by: str | None, is_indexed: bool) -> list[tuple[Tensor, bool]]:
        """What was changed, as many rows as examples, and whether it is one of each as far as anybody knows.

        Args:
            op: what was run.
            by: what picked rows before that it was given, maybe more of some examples than of others.
            is_indexed: whether it was given any rows that were picked.
        """
        view = op.source
        if not is_indexed or view is None or view._base is None:
            return []
        if op.name in _SO_ALREADY or (
            op.name != "__setitem__" and not any(one is view for one in tensors_in(op.output, op.kwargs))
        ):
            return []
        base, size = view._base, self._batch_size
        self._by[base] = by or self._by.get(base, "")
        return [(base, not self._by[base])] * (base.shape[:1] == (size,))

    def of(self, tensor: Tensor) -> str | None:
        """Which operation picked what was written into the memory of a tensor, if any did; "" if it is of all alike."""
        if not len(self._by):
            return None
        return self._by.get(_whole(tensor))  # type: ignore[no-any-return]

    def doubt(self, op: Operation, is_doubted: bool) -> None:
        """Takes note of a write, and whether nobody knows whose what was written is: then of all views of that."""
        whole = None if op.source is None else _whole(op.source)
        self._newly = whole if is_doubted and whole not in self._doubted else None
        if is_doubted and whole is not None:
            self._doubted[whole] = None

    @property
    def were_any(self) -> bool:
        """Whether any were written."""
        return len(self._by) + len(self._doubted) > 0

    def is_one_of_each(self, tensor: Tensor) -> bool | None:
        """Whether as many rows as examples are one of each, as far as what was written to their memory tells."""
        if not self.were_any:
            return None
        whole = _whole(tensor)
        if whole in self._doubted:
            return False
        # Also of a view that was made before they were written.
        return True if tensor.shape[:1] == (self._batch_size,) and self._by.get(whole) == "" else None

    def note(self, tensor: Tensor) -> None:
        """Takes note that rows which were picked were written into a tensor, and so into all views of it."""
        self._by.setdefault(_whole(tensor), "")

    def forget(self, tensor: Tensor) -> None:
        """Takes note that what lies there is in order."""
        base = _whole(tensor)
        if base.numel() == tensor.numel():
            self._by.pop(base, None)
        if base.numel() == tensor.numel() or base is self._newly:  # the rest is as it was
            self._doubted.pop(base, None)


def _whole(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base
