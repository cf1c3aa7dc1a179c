"""What autocast makes of the inputs of products."""

from __future__ import annotations

import torch
from torch import Tensor


class Casts:
    """Casts to fewer bits under autocast, made once for layers that read the same input.

    They are what is multiplied, so a weight's gradient follows from them. Both of its factors are of 16 bits then, as
    tensor cores multiply them.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, Tensor] | None = None

    def of(self, values: Tensor) -> Tensor:
        """`values`, or their cast where autocast would multiply that."""
        kind = values.device.type
        if values.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return values
        dtype = torch.get_autocast_dtype(kind)
        if values.is_inference():
            return values.to(dtype)
        if self._last is not None:
            # It is held, so that its memory cannot become another tensor's; its version is that of all its views.
            held, version, cast = self._last
            if cast.dtype == dtype and version == held._version and _is_same(held, values):
                return cast
        cast = values.to(dtype)
        self._last = values.detach(), values._version, cast
        return cast


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Whether both are the same numbers in memory."""
    return (
        one.untyped_storage()._cdata == two.untyped_storage()._cdata
        and one.storage_offset() == two.storage_offset()
        and one.shape == two.shape
        and one.stride() == two.stride()
    )
