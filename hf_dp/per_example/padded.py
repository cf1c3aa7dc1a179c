"""Products of 16-bit rows whose CPU kernels read beyond the end of a row: what is not finite there would spread.

oneDNN loads whole tiles for AMX (seen with torch 2.13): of rows that fill none, the next row's first numbers too. They
are multiplied by zeros, which leaves finite ones without effect, but not NaN and infinities: through layer after layer
one such example would take others with it, which would then be missing from the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.per_example.waiting import answers_at_once

Inside = Callable[[], AbstractContextManager[Any]]
# Numbers of 16 bits in a row of a tile.
_TILE = 32
_ATEN = torch.ops.aten
# Which operands are multiplied: (..., m, k), and (..., k, n) or (k,).
_PRODUCTS: dict[Any, int] = {
    _ATEN.mm.default: 0,
    _ATEN.bmm.default: 0,
    _ATEN.addmm.default: 1,
    _ATEN.mv.default: 0,
    _ATEN.addmv.default: 1,
    _ATEN.baddbmm.default: 1,
    _ATEN._grouped_mm.default: 0,
}
# One that is read so on the machines where any is.
_SHAPE = (33, _TILE + 1, 64)


class _Padded(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _PRODUCTS.get(func)
        if first is not None and args[first].dtype.itemsize == 2:
            left, right = args[first : first + 2]
            # Of two matrices of sorted rows it is the rows that are added up.
            if func is not _ATEN._grouped_mm.default or left.dim() < right.dim():
                missing = (0, -left.shape[-1] % _TILE)
                longer = F.pad(right, missing) if right.dim() == 1 else F.pad(right.mT, missing).mT
                args = (*args[:first], F.pad(left, missing), longer, *args[first + 2 :])
        return func(*args, **(kwargs or {}))


def each_row_by_itself() -> AbstractContextManager[Any]:
    """Inside, rows of products are filled up with zeros to whole tiles: slower, and of no row is the next one read."""
    return _Padded()  # type: ignore[no-untyped-call]


def reads_rows_together(device: torch.device) -> bool:
    """Whether the kernels of a device read so."""
    return answers_at_once(device) and _cpu_reads_so()


@functools.cache
def _cpu_reads_so() -> bool:
    height, length, width = _SHAPE
    rows = torch.ones(height, length, dtype=torch.bfloat16, device="cpu")
    rows[1] = torch.nan
    product: Tensor = rows @ rows.new_ones(length, width)
    return not bool(product[0].isfinite().all())
