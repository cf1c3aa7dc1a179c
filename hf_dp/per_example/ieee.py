"""Products as IEEE 754 says, whatever is set: neither autocast nor TF32, nor sums in fewer bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

# What lets cuBLAS add up products of 16-bit numbers in 16 bits.
_IN_FEWER_BITS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_beneath: Any = torch._C.DisableTorchFunction
# Where precisions are set, and what they are set to.
_MATMULS: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
_IEEE = ["ieee", "ieee"]
# "none" is where nobody has chosen: the default of products, which is the same.
_IN_FULL = {"ieee", "none"}


class full_precision:  # noqa: N801 - it is called as a function
    """Inside, products on a device are so: norms and sums must be of the same numbers."""

    # No generator: it may be entered for each use of each parameter.
    __slots__ = ("_device", "_stack")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        device = self._device
        if are_in_full(device):
            return
        with ExitStack() as stack:
            if not _IN_FULL.issuperset(before := precisions()):
                stack.enter_context(_in_ieee(before))
            if in_fewer := _in_fewer_bits(device):
                stack.enter_context(_sums_in_float32(in_fewer))
            if torch.is_autocast_enabled(device.type):
                stack.enter_context(torch.autocast(device.type, enabled=False))
            self._stack = stack.pop_all()

    def __exit__(self, *given: object) -> None:
        if self._stack is not None:
            self._stack.close()


def are_in_full(device: torch.device) -> bool:
    """Whether products on a device are so as it is. To ask takes longer than many a product."""
    is_cast = torch.is_autocast_enabled(device.type)
    return not is_cast and _IN_FULL.issuperset(precisions()) and not _in_fewer_bits(device)


def beneath_modes() -> AbstractContextManager[None]:
    """Inside, modes that see and change what a model calls see and change nothing: they take long over what is ours."""
    return _beneath()  # type: ignore[no-any-return]


@contextmanager
def whole_sums(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, products of 16-bit numbers are added up in float32 on the devices of all of these, the model's own too.

    To change that for each use of a parameter, and back, takes longer than many a product.
    """
    with beneath_modes():
        devices = {tensor.device for tensor in tensors}
    in_fewer = sorted({name for device in devices for name in _in_fewer_bits(device)})
    with _sums_in_float32(in_fewer) if in_fewer else nullcontext():
        yield


def _in_fewer_bits(device: torch.device) -> list[str]:
    """The settings that let products of 16-bit numbers there be added up in 16 bits."""
    if device.type != "cuda":
        return []
    cublas: Any = torch.backends.cuda.matmul
    return [name for name in _IN_FEWER_BITS if getattr(cublas, name)]


def precisions() -> list[str]:
    """In what products of float32 numbers are made, as it is set: "ieee", "none" for the same, or fewer bits."""
    return [matmul.fp32_precision for matmul in _MATMULS]


@contextmanager
def _in_ieee(before: list[str]) -> Iterator[None]:
    old = _by_the_old_name()
    try:
        if old != "highest":
            # Of two settings that disagree torch says nothing, and lets whoever asks (its profiler, say) fail.
            torch.set_float32_matmul_precision("highest")
        _set(_IEEE)
        yield
    finally:
        if old != "highest":
            torch.set_float32_matmul_precision(old)
        _set(before)


def _set(chosen: list[str]) -> None:
    for matmul, precision in zip(_MATMULS, chosen, strict=True):
        if matmul.fp32_precision != precision:
            matmul.fp32_precision = precision


def _by_the_old_name() -> str:
    """As `torch.set_float32_matmul_precision` has set it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # It was not asked, and other bits were chosen by the new name.
        return "highest"


@contextmanager
def _sums_in_float32(settings: list[str]) -> Iterator[None]:
    """Inside, products of 16-bit numbers are added up in float32 throughout, whatever these settings of cuBLAS say."""
    cublas: Any = torch.backends.cuda.matmul
    before = {name: getattr(cublas, name) for name in settings}

    def set_all(value: bool) -> None:
        for name in before:
            parts = getattr(cublas, f"{name}_split_k", None)
            setattr(cublas, name, value if parts is None else (value, parts))

    try:
        set_all(False)
        yield
    finally:
        set_all(True)
