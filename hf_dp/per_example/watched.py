"""The tensor that stands for a trainable parameter during a recording, and weights derived from one.

A weight that is a cast, a transposition or a scalar-affine image of one parameter (Gemma's `1 + w.float()`) is watched
in its place, and its factors are pulled back. Everything else that is done to a parameter is a use, and needs a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_dp.per_example.watch import Watch


class Source(NamedTuple):
    """What a watched tensor is: `scale` x parameter + constant, cast and transposed, with its plain value."""

    parameter: str
    watch: Watch
    plain: Tensor
    scale: float = 1.0
    is_transposed: bool = False

    def derived(self, plain: Tensor, scale: float = 1.0, transpose: bool = False) -> WatchedParameter:
        """The weight `plain`, computed from this one."""
        return WatchedParameter.of(
            self._replace(plain=plain.detach(), scale=self.scale * scale, is_transposed=self.is_transposed ^ transpose)
        )


class WatchedParameter(torch.Tensor):
    """Stands for a trainable parameter, or a weight derived from one, during a recording."""

    source: Source

    @staticmethod
    def of(source: Source) -> WatchedParameter:
        """A leaf that requires grad: should a use slip past the rules, its gradient lands here and is seen."""
        made: WatchedParameter = torch.Tensor._make_subclass(WatchedParameter, source.plain, True)
        made.source = source
        leaked, parameter = source.watch.leaked, source.parameter
        with torch._C.DisableTorchFunctionSubclass():
            made.register_hook(lambda _: leaked.add(parameter))  # type: ignore[no-untyped-call]
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _DETACHING:
            return args[0].source.plain
        derivation = _derive(func, args, kwargs)
        if derivation is not None:
            return derivation
        watch = next(a.source.watch for a in flatten((args, kwargs)) if isinstance(a, WatchedParameter))
        return watch.call(func, args, kwargs)


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_METADATA = {
    *(_getter(n) for n in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad")),
    *(
        _getter(n)
        for n in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mps", "is_xpu", "itemsize")
    ),
    *(_getter(n) for n in ("nbytes", "grad_fn", "is_nested", "is_mkldnn", "_version")),
    *(getattr(torch.Tensor, n) for n in ("size", "dim", "numel", "nelement", "stride", "is_contiguous", "get_device")),
    *(getattr(torch.Tensor, n) for n in ("is_floating_point", "is_complex", "element_size", "data_ptr", "__len__")),
    *(getattr(torch.Tensor, n) for n in ("ndimension", "storage_offset", "__hash__", "__repr__", "untyped_storage")),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
_DETACHING = {_getter("data"), torch.Tensor.detach, torch.detach}
_CASTS = {
    getattr(torch.Tensor, n) for n in ("to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous")
}
_TRANSPOSES = {_getter("T"), _getter("mT"), torch.Tensor.t, torch.t, torch.Tensor.transpose, torch.transpose}
_SCALES = {
    **dict.fromkeys((torch.Tensor.add, torch.add, torch.Tensor.__add__, torch.Tensor.__radd__), "add"),
    **dict.fromkeys((torch.Tensor.sub, torch.sub, torch.Tensor.__sub__), "sub"),
    **dict.fromkeys((torch.Tensor.__rsub__, torch.rsub), "rsub"),
    **dict.fromkeys((torch.Tensor.mul, torch.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), "mul"),
    **dict.fromkeys((torch.Tensor.div, torch.div, torch.Tensor.__truediv__), "div"),
    **dict.fromkeys((torch.Tensor.neg, torch.neg, torch.Tensor.__neg__), "neg"),
}


def _derive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A weight derived from one watched parameter alone, if `func` is a cast, a transposition or scalar-affine."""
    watched = [a for a in flatten((args, kwargs)) if isinstance(a, WatchedParameter)]
    parameter = watched[0]
    if func in _CASTS and parameter is args[0]:
        target = [a.source.plain if isinstance(a, WatchedParameter) else a for a in args[1:]]
        return parameter.source.derived(func(parameter.source.plain, *target, **kwargs))
    if func in _TRANSPOSES and parameter.source.plain.dim() == 2:
        return parameter.source.derived(
            func(parameter.source.plain, *args[1:], **kwargs), transpose=_swaps(args[1:], kwargs)
        )
    kind = _SCALES.get(func)
    if kind is None or kwargs or len(watched) != 1:
        return None
    others = [a for a in args if a is not parameter]
    if not all(
        isinstance(a, (int, float)) or (isinstance(a, Tensor) and a.dim() == 0 and not a.requires_grad) for a in others
    ):
        return None
    plain = func(*(a.source.plain if isinstance(a, WatchedParameter) else a for a in args))
    constant = float(others[0]) if others else 1.0
    is_first = args[0] is parameter
    if kind == "div" and not is_first:
        return None
    scales = {"add": 1.0, "sub": 1.0 if is_first else -1.0, "rsub": -1.0 if is_first else 1.0, "neg": -1.0}
    scale = constant if kind == "mul" else 1.0 / constant if kind == "div" else scales[kind]
    return parameter.source.derived(plain, scale)


def _swaps(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    axes = [*args, *kwargs.values()]
    return not axes or axes[0] % 2 != axes[1] % 2


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from flatten(item)
    elif isinstance(value, dict):
        yield from flatten(tuple(value.values()))
    else:
        yield value
