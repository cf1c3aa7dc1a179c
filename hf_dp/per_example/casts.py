"""What autocast makes of the inputs of products."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Casts:
    """Casts to fewer bits under autocast, made once for layers that read the same input.

    They are what is multiplied, so a weight's gradient follows from them. Both of its factors are of 16 bits then, as
    tensor cores multiply them.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def of(self, values: Tensor) -> tuple[Tensor, bool]:
        """`values`, or their cast where autocast would multiply that; and whether it is of this moment."""
        if values.dtype != torch.float32 or not torch.is_autocast_enabled(kind := values.device.type):
            return values, True
        dtype = torch.get_autocast_dtype(kind)
        # Of what autograd knows writes in place are counted, unless they pass it by.
        if not values.requires_grad or values.is_inference():
            return values.to(dtype), True
        if self._last is not None:
            last, version, cast = self._last
            if last() is values and version == values._version and cast.dtype == dtype:
                return cast, False
        cast = values.to(dtype)
        self._last = weakref.ref(values), values._version, cast
        return cast, True
