"""Norms and sums are of the same numbers, in at least float32, whatever the model runs in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

_FEWER_BITS = {
    torch.float32: {torch.float16, torch.bfloat16},
    torch.float64: {torch.float16, torch.bfloat16, torch.float32},
}
# What lets cuBLAS add up products of 16-bit numbers in 16 bits.
_IN_FEWER_BITS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_CASTS = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Neither autocast nor TF32, nor sums in fewer bits: norms and sums must be of the same numbers."""
    matmuls = [m for m in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul) if m.fp32_precision != "ieee"]  # type: ignore[attr-defined]
    before = [m.fp32_precision for m in matmuls]
    try:
        for matmul in matmuls:
            matmul.fp32_precision = "ieee"
        with _sums_in_float32(device.type == "cuda"), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for matmul, precision in zip(matmuls, before, strict=True):
            matmul.fp32_precision = precision


@contextmanager
def _sums_in_float32(is_asked: bool) -> Iterator[None]:
    """Inside, products of 16-bit numbers are added up in float32 throughout."""
    cublas: Any = torch.backends.cuda.matmul
    before = {name: getattr(cublas, name) for name in _IN_FEWER_BITS if is_asked and getattr(cublas, name)}

    def set_all(value: bool) -> None:
        for name in before:
            parts = getattr(cublas, f"{name}_split_k", None)
            setattr(cublas, name, value if parts is None else (value, parts))

    try:
        set_all(False)
        yield
    finally:
        set_all(True)


@contextmanager
def computed_in(model: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Lets `model` compute in no fewer bits than `dtype` (float32 or float64), autocast and its own casts included.

    What rounding does is told from what a model does. Nothing is checkpointed meanwhile. Parameters, buffers and
    `.grad` come back as they were, to the bit. Shards (FSDP2), integers and quantised weights are left alone.

    Yields:
        `batch` in as many bits.
    """

    def lifted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _FEWER_BITS[dtype] else value

    named = [*model.named_parameters(), *model.named_buffers()]
    if any(isinstance(value, DTensor) for _, value in named):
        yield dict(batch)
        return
    # A weight of a quantised kind is a tensor of another class.
    low = [value for _, value in named if value.dtype in _FEWER_BITS[dtype] and type(value.data) is Tensor]
    kept = [(value, value.data, value.grad) for value in low]
    try:
        for value in low:
            value.grad = None
            value.data = lifted(value.data)
        with _without_checkpoints(model), _NoFewerBits(dtype, {value.device.type for _, value in named}):
            yield {name: lifted(value) for name, value in batch.items()}
    finally:
        for value, data, gradient in kept:
            value.grad = None
            value.data = data
            value.grad = gradient


@contextmanager
def _without_checkpoints(model: nn.Module) -> Iterator[None]:
    """What gradient checkpointing computes again would be in 16 bits, under the autocast that it has noted."""
    on = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    try:
        for module in on:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        yield
    finally:
        for module in on:
            module.gradient_checkpointing = True  # type: ignore[assignment]


class _NoFewerBits(TorchFunctionMode):
    """Where an operation would give fewer bits than `dtype`, it gives `dtype`."""

    def __init__(self, dtype: torch.dtype, kinds: set[str]) -> None:
        self.dtype, self.kinds, self.fewer = dtype, kinds, _FEWER_BITS[dtype]
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # It is asked for every operation and every attribute of a tensor, so what changes nothing is found out first.
        kwargs = kwargs or {}
        # A parameter that is watched must be seen in the operation that it is used by.
        if _CASTS.get(func) in self.fewer and type(args[0]) is Tensor:
            func, args = Tensor.to, (args[0], self.dtype)
        if torch.dtype in map(type, (*args, *kwargs.values())):
            args, kwargs = [*map(self._enough, args)], {name: self._enough(value) for name, value in kwargs.items()}
        if not any(map(torch.is_autocast_enabled, self.kinds)):
            return func(*args, **kwargs)
        with ExitStack() as without:
            for kind in filter(torch.is_autocast_enabled, self.kinds):
                without.enter_context(torch.autocast(kind, enabled=False))
            return func(*args, **kwargs)

    def _enough(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in self.fewer else value


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are accumulated in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def accumulation(values: Tensor) -> Tensor:
    """`values` in the dtype that sums are accumulated in."""
    return values.to(sum_dtype(values.dtype))
