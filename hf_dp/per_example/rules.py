"""One explicit table: torch function -> the factors of each parameter that it uses.

A rule repeats what autograd would do for the input and replaces the weight gradient by its factors. To add one for an
operation of your own, pass `{**RULES, my_function: Rule(...)}` to `record` and `preflight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.convolutions import CONVOLUTIONS
from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.instantiate import instantiating
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.precision import accumulation, sum_dtype
from hf_dp.per_example.products import times
from hf_dp.per_example.recurrent import RECURRENT
from hf_dp.per_example.rule import Axis, Bound, Operands, Rule
from hf_dp.per_example.watched import WatchedParameter

_Backward = tuple[Tensor | None, dict[str, Factors | None]]
_Saved = tuple[Tensor, ...]


def _parameter(operands: Operands, role: str) -> Tensor:
    value = operands.parameters[role]
    assert value is not None
    return value


# --- y = x W^T + b, and y = x W + b ---------------------------------------------------------------------------------


def _bind_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Bound:
    if bias is not None and weight.dim() == 1:
        raise _unsupported("linear", "a vector as weight, and a bias", "it is known without one")
    return Bound(input, {"weight": weight, "bias": bias}, {})


def _bind_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Bound:
    if beta != 1 or alpha != 1:
        raise _unsupported("addmm", f"beta={beta}, alpha={alpha}", "only beta = alpha = 1 is known")
    if input.dim() != 1:
        raise _unsupported("addmm", f"a summand of shape {tuple(input.shape)}", "only a bias vector is known")
    return Bound(mat1, {"weight": mat2, "bias": input}, {"transposed": True})


def _bind_matmul(input: Tensor, other: Tensor) -> Bound:
    if other.dim() not in (1, 2) or input.dim() < 2 or not isinstance(other, WatchedParameter):
        raise _unsupported(
            "matmul",
            f"shapes {tuple(input.shape)} and {tuple(other.shape)}",
            "only x @ W with a matrix or a vector W is known",
        )
    return Bound(input, {"weight": other, "bias": None}, {"transposed": True})


def _linear(x: Tensor, operands: Operands) -> tuple[Tensor, _Saved]:
    weight, bias = _parameter(operands, "weight"), operands.parameters["bias"]
    weight = weight.T if operands.options.get("transposed") and weight.dim() == 2 else weight
    return F.linear(x, weight, bias), (x,) if "weight" in operands.watched else ()


def _linear_backward(saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> _Backward:
    weight, is_transposed = _parameter(operands, "weight"), operands.options.get("transposed")
    if weight.dim() == 1:
        return _multiply_backward(saved, operands, gradient.unsqueeze(-1), axis, needs_input)
    factors: dict[str, Factors | None] = {}
    if "weight" in operands.watched:
        outer = Outer(Dense(axis.positions(gradient)), Dense(axis.positions(saved[0])))
        factors["weight"] = outer.transposed if is_transposed else outer
    if "bias" in operands.watched:
        factors["bias"] = PerExample.over(axis.positions(gradient))
    if not needs_input:
        return None, factors
    weight = weight.to(gradient.dtype)
    return times(gradient, weight.T if is_transposed else weight), factors


# --- embedding lookup -----------------------------------------------------------------------------------------------


def _bind_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Bound:
    if max_norm is not None or scale_grad_by_freq:
        raise _unsupported(
            "embedding",
            f"max_norm={max_norm}, scale_grad_by_freq={scale_grad_by_freq}",
            "the first changes weights in the forward pass, the second mixes the counts of all examples",
        )
    return Bound(input, {"weight": weight}, {"padding_idx": padding_idx})


def _embedding(ids: Tensor, operands: Operands) -> tuple[Tensor, _Saved]:
    return F.embedding(ids, _parameter(operands, "weight")), (ids,)


def _embedding_backward(
    saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool
) -> _Backward:
    (ids,), weight = saved, _parameter(operands, "weight")
    padding = operands.options["padding_idx"]
    if padding is not None:
        gradient = gradient.masked_fill(ids.eq(padding % weight.shape[0]).unsqueeze(-1), 0)
    ids = ids.long().reshape(axis.batch_size, -1)
    return None, {"weight": Outer(OneHot(ids, weight.shape[0]), Dense(axis.positions(gradient)))}


# --- normalisation --------------------------------------------------------------------------------------------------


def _last_axes(input: Tensor, normalized_shape: Any) -> list[int]:
    shape = list(normalized_shape)
    if 1 < len(shape) >= input.dim():
        raise _unsupported(
            "normalisation", f"normalized_shape={shape}", "no axis of the input is left for the examples"
        )
    return shape


def _over(values: Tensor, operands: Operands, axis: Axis) -> PerExample:
    shape = operands.options["shape"]
    if len(shape) == 1:
        return PerExample.over(axis.positions(values))
    found = PerExample.over(axis.positions(values.flatten(-len(shape))))
    return replace(found, values=found.values.unflatten(1, shape))


def _bind_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Bound:
    shape = _last_axes(input, normalized_shape)
    return Bound(input, {"weight": weight, "bias": bias}, {"shape": shape, "eps": eps, "is_orderless": len(shape) == 1})


def _layer_norm(x: Tensor, operands: Operands) -> tuple[Tensor, _Saved]:
    options = operands.options
    output, mean, rstd = torch.native_layer_norm(
        x, options["shape"], operands.parameters["weight"], operands.parameters["bias"], options["eps"]
    )
    return output, (x, mean, rstd)


def _layer_norm_backward(
    saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool
) -> _Backward:
    x, mean, rstd = saved
    weight, bias = operands.parameters["weight"], operands.parameters["bias"]
    factors: dict[str, Factors | None] = {}
    if "weight" in operands.watched:
        normalised = accumulation(x - mean).mul_(rstd)
        factors["weight"] = _over(normalised.mul_(gradient), operands, axis)
    if "bias" in operands.watched:
        factors["bias"] = _over(gradient, operands, axis)
    if not needs_input:
        return None, factors
    # Under autocast weights are in more bits than what a layer before gave, and CUDA's kernel takes one type alone.
    dtype = x.dtype if weight is None else weight.dtype
    (input_gradient, _, _) = torch.ops.aten.native_layer_norm_backward(
        gradient.to(dtype), x.to(dtype), operands.options["shape"], mean, rstd, weight, bias, [True, False, False]
    )
    return input_gradient, factors


def _bind_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Bound:
    # Torch's default, which is that of the type it computes in and not of the input's.
    eps = torch.finfo(sum_dtype(input.dtype)).eps if eps is None else eps
    shape = _last_axes(input, normalized_shape)
    return Bound(input, {"weight": weight}, {"shape": shape, "eps": eps, "is_orderless": len(shape) == 1})


def _rms_norm(x: Tensor, operands: Operands) -> tuple[Tensor, _Saved]:
    options = operands.options
    return F.rms_norm(x, options["shape"], operands.parameters["weight"], options["eps"]), (x,)


def _rms_norm_backward(saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> _Backward:
    (x,), weight, eps = saved, _parameter(operands, "weight"), operands.options["eps"]
    wide, gradient = accumulation(x), accumulation(gradient)
    last = [*range(-len(operands.options["shape"]), 0)]
    rstd = (wide.square().mean(last, keepdim=True) + eps).rsqrt()
    normalised = wide * rstd
    factors: dict[str, Factors | None] = {"weight": _over(gradient * normalised, operands, axis)}
    if not needs_input:
        return None, factors
    weighted = gradient * weight
    return rstd * (weighted - normalised * (weighted * normalised).mean(last, keepdim=True)), factors


# --- elementwise ----------------------------------------------------------------------------------------------------


def _bind_elementwise(input: Tensor, other: Tensor, *, alpha: float = 1) -> Bound:
    data, weight = (other, input) if isinstance(input, WatchedParameter) else (input, other)
    if alpha != 1 or not isinstance(data, Tensor):
        raise _unsupported("an elementwise operation", f"alpha={alpha}", "only x * w and x + w are known")
    shape, dimensions = weight.shape, data.dim()
    # Data may be the narrower one in all axes but the first (T5's mask and bias).
    if not (len(shape) < dimensions or (len(shape) == dimensions > 0 and shape[0] == 1)):
        raise _unsupported(
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


def _multiply(x: Tensor, operands: Operands) -> tuple[Tensor, _Saved]:
    return x * _parameter(operands, "weight"), (x,)


def _multiply_backward(saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> _Backward:
    (x,), weight = saved, _parameter(operands, "weight")
    factors: dict[str, Factors | None] = {"weight": _share(gradient * x, weight, axis)}
    return (gradient * weight).sum_to_size(x.shape) if needs_input else None, factors


def _add(x: Tensor, operands: Operands) -> tuple[Tensor, _Saved]:
    return x + _parameter(operands, "weight"), (x.new_empty(0).expand(*x.shape, 0),)


def _add_backward(saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> _Backward:
    shape = saved[0].shape[:-1]
    factors: dict[str, Factors | None] = {"weight": _share(gradient, _parameter(operands, "weight"), axis)}
    return gradient.sum_to_size(shape) if needs_input else None, factors


# --- rows chosen from a parameter (experts) -------------------------------------------------------------------------


def _bind_getitem(input: Tensor, index: Any) -> Bound:
    if (
        not isinstance(index, Tensor)
        or index.is_floating_point()
        or index.dtype in (torch.bool, torch.uint8)
        or not index.dim()
    ):
        raise _unsupported(
            "getitem", f"an index of type {type(index).__name__}", "only a tensor of row numbers is known"
        )
    return Bound(index, {"weight": input}, {})


def _getitem(index: Tensor, operands: Operands) -> tuple[Tensor, _Saved]:
    return _parameter(operands, "weight")[index], (index,)


def _getitem_backward(saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> _Backward:
    (index,), weight = saved, _parameter(operands, "weight")
    ids = index.long().remainder(weight.shape[0]).reshape(axis.batch_size, -1)
    rows = gradient.reshape(axis.batch_size, ids.shape[1], -1)
    return None, {"weight": Outer(OneHot(ids, weight.shape[0]), Dense(rows))}


# --- a parameter repeated for every example (class tokens) ----------------------------------------------------------


def _bind_expand(input: Tensor, *sizes: Any) -> Bound:
    shape = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    if _are_states(input, shape) and shape[0] in (-1, len(input)):
        return Bound(None, {"weight": input}, {"rows": abs(shape[1]), "shape": shape, "are_states": True})
    # The axis of the copies is new, or is there with one entry.
    if len(shape) < max(1, input.dim()) or (len(shape) == input.dim() and input.shape[0] != 1):
        raise _unsupported(
            "expand", f"shape {tuple(input.shape)} to {shape}", "only copies along a first axis are known"
        )
    return Bound(None, {"weight": input}, {"rows": abs(shape[0]), "shape": shape})


def _are_states(weight: Tensor, shape: list[int]) -> bool:
    """Whether copies may be along the second axis, where recurrent layers have the examples: (layers, 1, hidden)."""
    return len(shape) == weight.dim() > 2 and weight.shape[1] == 1


def _expand(_: None, operands: Operands) -> tuple[Tensor, _Saved]:
    return _parameter(operands, "weight").expand(operands.options["shape"]).clone(
        memory_format=torch.contiguous_format
    ), ()


def _expand_backward(saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> _Backward:
    weight = _parameter(operands, "weight")
    if "are_states" not in operands.options:
        return None, {"weight": _share(gradient, weight, axis)}
    found = _share(gradient.transpose(0, 1), weight.transpose(0, 1), axis)
    return None, {"weight": replace(found, values=found.values.transpose(1, 2))}


def _bind_repeat(input: Tensor, *sizes: Any) -> Bound:
    times = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    if len(times) < max(1, input.dim()):  # tile puts ones in front
        raise _unsupported(
            "repeat", f"shape {tuple(input.shape)} by {times}", "only copies along a first axis are known"
        )
    rows = times[1] if _are_states(input, times) and times[0] == 1 else times[0]
    return Bound(None, {"weight": input}, {"rows": rows, "sizes": times})


def _bind_expand_as(input: Tensor, other: Tensor) -> Bound:
    return _bind_expand(input, other.shape)


def _repeat(_: None, operands: Operands) -> tuple[Tensor, _Saved]:
    return _parameter(operands, "weight").repeat(operands.options["sizes"]), ()


def _repeat_backward(saved: _Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> _Backward:
    weight, times = _parameter(operands, "weight"), operands.options["sizes"]
    shape = [1] * (len(times) - weight.dim()) + list(weight.shape)
    copies = gradient.reshape([size for axes in zip(times, shape, strict=True) for size in axes])
    order = [*range(0, copies.dim(), 2), *range(1, copies.dim(), 2)]
    rows = copies.permute(order).reshape(axis.batch_size, -1, *weight.shape)
    dtype = sum_dtype(rows.dtype)
    lengths = Lengths(torch.linalg.vector_norm(rows.reshape(*rows.shape[:2], -1), dim=2, dtype=dtype))
    return None, {"weight": PerExample(rows.sum(1, dtype=dtype), lengths=lengths)}


def _bind_group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Bound:
    return Bound(input, {"weight": weight, "bias": bias}, {"num_groups": num_groups, "eps": eps})


def _unsupported(operation: str, found: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{operation} with {found} uses a trainable parameter.",
        why=f"{why}; a gradient that is not known to be exact would break the clipping bound.",
        fix="freeze the parameter, train with LoRA, or pass a rule for the operation (docs/rules.md).",
    )


_LINEAR = Rule("linear", _bind_linear, _linear, _linear_backward, is_product=True, is_orderless=True)
_ADDMM = Rule("addmm", _bind_addmm, _linear, _linear_backward, is_product=True)
_MATMUL = Rule("matmul", _bind_matmul, _linear, _linear_backward, is_product=True, is_orderless=True)
_EMBEDDING = Rule("embedding", _bind_embedding, _embedding, _embedding_backward, features=0, is_orderless=True)
_LAYER_NORM = Rule("layer_norm", _bind_layer_norm, _layer_norm, _layer_norm_backward, is_orderless=True)
_RMS_NORM = Rule("rms_norm", _bind_rms_norm, _rms_norm, _rms_norm_backward, is_orderless=True)
_MULTIPLY = Rule("multiply", _bind_elementwise, _multiply, _multiply_backward, features=0, is_orderless=True)
_ADD = Rule("add", _bind_elementwise, _add, _add_backward, features=0, is_orderless=True)
_GETITEM = Rule("getitem", _bind_getitem, _getitem, _getitem_backward, features=0)
_EXPAND = Rule("expand", _bind_expand, _expand, _expand_backward, features=0)
_REPEAT = Rule("repeat", _bind_repeat, _repeat, _repeat_backward, features=0)
_GROUP_NORM = instantiating(
    "group_norm", _bind_group_norm, lambda x, p, o: F.group_norm(x, weight=p["weight"], bias=p["bias"], **o), features=2
)

RULES: Mapping[Any, Rule] = MappingProxyType(
    {
        F.linear: _LINEAR,
        torch.addmm: _ADDMM,
        torch.matmul: _MATMUL,
        torch.Tensor.matmul: _MATMUL,
        torch.Tensor.__matmul__: _MATMUL,
        F.embedding: _EMBEDDING,
        F.layer_norm: _LAYER_NORM,
        F.rms_norm: _RMS_NORM,
        F.group_norm: _GROUP_NORM,
        **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _MULTIPLY),
        **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), _ADD),
        torch.Tensor.__getitem__: _GETITEM,
        torch.Tensor.expand: _EXPAND,
        torch.Tensor.expand_as: replace(_EXPAND, bind=_bind_expand_as),
        **dict.fromkeys((torch.Tensor.repeat, torch.Tensor.tile, torch.tile), _REPEAT),
        **CONVOLUTIONS,
        **RECURRENT,
    }
)
