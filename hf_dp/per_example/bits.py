"""Checksums of tensors, on their own devices."""

from __future__ import annotations

import torch
from torch import Tensor

# Sums of shorter numbers copy them to longer ones first: of so many rows at a time.
_ROWS = 1024
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_in_place(values: Tensor) -> Tensor:
    """(n + m,) int64: the bits of each row and of each column of values (..., m): others in another order, too."""
    rows = values.detach().reshape(-1, values.shape[-1] if values.dim() else 1)
    rows = rows.contiguous().view(_BITS[values.element_size()])
    parts = rows.split(_ROWS)
    columns = torch.stack([part.sum(0, dtype=torch.int64) for part in parts]).sum(0)
    return torch.cat([*(part.sum(1, dtype=torch.int64) for part in parts), columns])


def bits_of(values: Tensor) -> Tensor:
    """(B,) int64: the bits of each row of (B, ...), added up as whole numbers, so in whatever order."""
    rows, size = values.detach().reshape(len(values), -1), values.element_size()
    if rows.numel() and rows.shape[1] * size % 8 == rows.storage_offset() * size % 8 == 0 and rows.is_contiguous():
        return rows.view(torch.int64).sum(1)
    # Sums of shorter numbers copy them to longer ones first: of one example at a time.
    return torch.stack([row.view(_BITS[size]).sum(dtype=torch.int64) for row in rows])
