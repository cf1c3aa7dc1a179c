"""Norms and sums are of the same numbers, in at least float32, whatever the model runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor TF32: norms and sums must be of the same numbers."""
    matmuls = [m for m in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul) if m.fp32_precision != "ieee"]  # type: ignore[attr-defined]
    before = [m.fp32_precision for m in matmuls]
    try:
        for matmul in matmuls:
            matmul.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for matmul, precision in zip(matmuls, before, strict=True):
            matmul.fp32_precision = precision


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are accumulated in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulation(values: Tensor) -> Tensor:
    """`values` in the dtype that sums are accumulated in."""
    return values.to(sum_dtype(values.dtype))
