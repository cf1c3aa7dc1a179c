"""Scales and summands, and a parameter that is repeated for every example (class tokens)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.precision import sum_dtype
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved, unsupported
from hf_dp.per_example.watched import WatchedParameter


def _bind_elementwise(input: Tensor, other: Tensor, *, alpha: float = 1) -> Bound:
    data, weight = (other, input) if isinstance(input, WatchedParameter) else (input, other)
    if alpha != 1 or not isinstance(data, Tensor):
        raise unsupported("an elementwise operation", f"alpha={alpha}", "only x * w and x + w are known")
    shape, dimensions = weight.shape, data.dim()
    # Data may be the narrower one in all axes but the first (T5's mask and bias).
    if not (len(shape) < dimensions or (len(shape) == dimensions > 0 and shape[0] == 1)):
        raise unsupported(
            "an elementwise operation",
            f"shapes {tuple(data.shape)} and {tuple(shape)}",
            "the parameter must broadcast against the example axis, so that each example's share is known",
        )
    return Bound(data, {"weight": weight}, {"is_orderless": len(shape) < dimensions - 1})


def _share(values: Tensor, weight: Tensor, axis: Axis) -> PerExample:
    inner = weight.shape[1:] if weight.dim() == values.dim() else weight.shape
    # Its axes that are not summed over.
    kept = [k for k in range(1, len(inner) + 1) if inner[-k] == values.shape[-k]]
    dtype = sum_dtype(values.dtype)
    norms = torch.linalg.vector_norm(values, dim=[-k for k in kept], dtype=dtype) if kept else values.abs().to(dtype)
    rows = axis.rows(values).sum(1, dtype=sum_dtype(values.dtype))
    rows = rows.sum_to_size(rows.shape[0], *[1] * (rows.dim() - 1 - len(inner)), *inner)
    lengths = Lengths(norms.reshape(axis.batch_size, -1))
    return PerExample(rows.reshape(rows.shape[0], *weight.shape), lengths=lengths)


def _multiply(x: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    return x * operands.needed("weight"), (x,)


def multiply_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    (x,), weight = saved, operands.needed("weight")
    factors: dict[str, Factors | None] = {"weight": _share(gradient * x, weight, axis)}
    return (gradient * weight).sum_to_size(x.shape) if needs_input else None, factors


def _add(x: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    return x + operands.needed("weight"), (x.new_empty(0).expand(*x.shape, 0),)


def _add_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    shape = saved[0].shape[:-1]
    factors: dict[str, Factors | None] = {"weight": _share(gradient, operands.needed("weight"), axis)}
    return gradient.sum_to_size(shape) if needs_input else None, factors


def _bind_expand(input: Tensor, *sizes: Any) -> Bound:
    shape = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    if _are_states(input, shape) and shape[0] in (-1, _led(input, shape)[0]):
        return Bound(None, {"weight": input}, {"rows": abs(shape[1]), "shape": shape, "are_states": True})
    # The axis of the copies is new, or is there with one entry.
    if len(shape) < max(1, input.dim()) or (len(shape) == input.dim() and input.shape[0] != 1):
        raise unsupported(
            "expand", f"shape {tuple(input.shape)} to {shape}", "only copies along a first axis are known"
        )
    return Bound(None, {"weight": input}, {"rows": abs(shape[0]), "shape": shape})


def _are_states(weight: Tensor, shape: list[int]) -> bool:
    """Whether copies may be along the second axis, where recurrent layers have the examples: (layers, 1, hidden)."""
    return len(shape) > 2 and len(shape) >= weight.dim() and _led(weight, shape)[1] == 1


def _led(weight: Tensor, shape: list[int]) -> list[int]:
    """The axes of a parameter that is given as many as `shape` has: new ones come first."""
    return [1] * (len(shape) - weight.dim()) + list(weight.shape)


def _expand(_: None, operands: Operands) -> tuple[Tensor, Saved]:
    return operands.needed("weight").expand(operands.options["shape"]).clone(memory_format=torch.contiguous_format), ()


def _expand_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    weight = operands.needed("weight")
    if "are_states" not in operands.options:
        return None, {"weight": _share(gradient, weight, axis)}
    states = weight.reshape(_led(weight, operands.options["shape"]))
    found = _share(gradient.transpose(0, 1), states.transpose(0, 1), axis)
    return None, {"weight": replace(found, values=found.values.transpose(1, 2).reshape(-1, *weight.shape))}


def _bind_repeat(input: Tensor, *sizes: Any) -> Bound:
    times = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    if len(times) < max(1, input.dim()):  # tile puts ones in front
        raise unsupported(
            "repeat", f"shape {tuple(input.shape)} by {times}", "only copies along a first axis are known"
        )
    rows = times[1] if _are_states(input, times) and times[0] == 1 else times[0]
    return Bound(None, {"weight": input}, {"rows": rows, "sizes": times})


def _bind_expand_as(input: Tensor, other: Tensor) -> Bound:
    return _bind_expand(input, other.shape)


def _repeat(_: None, operands: Operands) -> tuple[Tensor, Saved]:
    return operands.needed("weight").repeat(operands.options["sizes"]), ()


def _repeat_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    weight, times = operands.needed("weight"), operands.options["sizes"]
    shape = _led(weight, times)
    copies = gradient.reshape([size for axes in zip(times, shape, strict=True) for size in axes])
    order = [*range(0, copies.dim(), 2), *range(1, copies.dim(), 2)]
    rows = copies.permute(order).reshape(axis.batch_size, -1, *weight.shape)
    dtype = sum_dtype(rows.dtype)
    lengths = Lengths(torch.linalg.vector_norm(rows.reshape(*rows.shape[:2], weight.numel()), dim=2, dtype=dtype))
    return None, {"weight": PerExample(rows.sum(1, dtype=dtype), lengths=lengths)}


_MULTIPLY = Rule("multiply", _bind_elementwise, _multiply, multiply_backward, features=0, is_orderless=True)
_ADD = Rule("add", _bind_elementwise, _add, _add_backward, features=0, is_orderless=True)
_EXPAND = Rule("expand", _bind_expand, _expand, _expand_backward, features=0)
_REPEAT = Rule("repeat", _bind_repeat, _repeat, _repeat_backward, features=0)

ELEMENTWISE: Mapping[Any, Rule] = MappingProxyType(
    {
        **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _MULTIPLY),
        **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), _ADD),
        **dict.fromkeys((torch.Tensor.expand, torch.Tensor.broadcast_to, torch.broadcast_to), _EXPAND),
        torch.Tensor.expand_as: replace(_EXPAND, bind=_bind_expand_as),
        **dict.fromkeys((torch.Tensor.repeat, torch.Tensor.tile, torch.tile), _REPEAT),
    }
)
