"""Normalisation of each position, or each example, by itself, with a scale and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.precision import accumulation, sum_dtype
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved, unsupported
from hf_dp.per_example.rules.instantiate import instantiating


def _last_axes(input: Tensor, normalized_shape: Any) -> list[int]:
    shape = list(normalized_shape)
    if 1 < len(shape) >= input.dim():
        raise unsupported("normalisation", f"normalized_shape={shape}", "no axis of the input is left for the examples")
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


def _layer_norm(x: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    options = operands.options
    output, mean, rstd = torch.native_layer_norm(
        x, options["shape"], operands.parameters["weight"], operands.parameters["bias"], options["eps"]
    )
    return output, (x, mean, rstd)


def _layer_norm_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
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


def _rms_norm(x: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    options = operands.options
    return F.rms_norm(x, options["shape"], operands.parameters["weight"], options["eps"]), (x,)


def _rms_norm_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    (x,), weight, eps = saved, operands.needed("weight"), operands.options["eps"]
    wide, gradient = accumulation(x), accumulation(gradient)
    last = [*range(-len(operands.options["shape"]), 0)]
    rstd = (wide.square().mean(last, keepdim=True) + eps).rsqrt()
    normalised = wide * rstd
    factors: dict[str, Factors | None] = {"weight": _over(gradient * normalised, operands, axis)}
    if not needs_input:
        return None, factors
    weighted = gradient * weight
    return rstd * (weighted - normalised * (weighted * normalised).mean(last, keepdim=True)), factors


def _bind_group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Bound:
    # Rows of features alone, (n, C), are read as those of one place: the axes behind the rows are no positions.
    is_flat = input.dim() == 2
    options = {"num_groups": num_groups, "eps": eps, "is_flat": is_flat}
    # Of one place, in rows that lie apart, torch's kernel takes the strides for another layout when it is mapped.
    given = input.contiguous() if input.shape[2:].numel() == 1 else input
    return Bound(given.unsqueeze(-1) if is_flat else given, {"weight": weight, "bias": bias}, options)


def _group_norm(x: Tensor, parameters: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
    given = x.squeeze(-1) if options["is_flat"] else x
    return F.group_norm(given, options["num_groups"], parameters["weight"], parameters["bias"], options["eps"])


NORMALISATION: Mapping[Any, Rule] = MappingProxyType(
    {
        F.layer_norm: Rule("layer_norm", _bind_layer_norm, _layer_norm, _layer_norm_backward, is_orderless=True),
        F.rms_norm: Rule("rms_norm", _bind_rms_norm, _rms_norm, _rms_norm_backward, is_orderless=True),
        F.group_norm: instantiating("group_norm", _bind_group_norm, _group_norm, features=2),
    }
)
