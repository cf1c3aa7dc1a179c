"""y = x W^T + b and y = x W + b: at each position the product of a gradient and an input."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.products import times
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved, unsupported
from hf_dp.per_example.rules.elementwise import multiply_backward
from hf_dp.per_example.watched import WatchedParameter


def _bind_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Bound:
    if bias is not None and weight.dim() == 1:
        raise unsupported("linear", "a vector as weight, and a bias", "it is known without one")
    return Bound(input, {"weight": weight, "bias": bias}, {})


def _bind_addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Bound:
    if beta != 1 or alpha != 1:
        raise unsupported("addmm", f"beta={beta}, alpha={alpha}", "only beta = alpha = 1 is known")
    if input.dim() != 1:
        raise unsupported("addmm", f"a summand of shape {tuple(input.shape)}", "only a bias vector is known")
    return Bound(mat1, {"weight": mat2, "bias": input}, {"transposed": True})


def _bind_matmul(input: Tensor, other: Tensor) -> Bound:
    if other.dim() not in (1, 2) or input.dim() < 2 or not isinstance(other, WatchedParameter):
        raise unsupported(
            "matmul",
            f"shapes {tuple(input.shape)} and {tuple(other.shape)}",
            "only x @ W with a matrix or a vector W is known",
        )
    return Bound(input, {"weight": other, "bias": None}, {"transposed": True})


def _linear(x: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    weight, bias = operands.needed("weight"), operands.parameters["bias"]
    weight = weight.T if operands.options.get("transposed") and weight.dim() == 2 else weight
    return F.linear(x, weight, bias), (x,) if "weight" in operands.watched else ()


def _linear_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    weight, is_transposed = operands.needed("weight"), operands.options.get("transposed")
    if weight.dim() == 1:
        return multiply_backward(saved, operands, gradient.unsqueeze(-1), axis, needs_input)
    factors: dict[str, Factors | None] = {}
    if "weight" in operands.watched:
        outer = Outer(Dense(axis.positions(gradient)), Dense(axis.positions(saved[0])))
        factors["weight"] = outer.transposed if is_transposed else outer
    if "bias" in operands.watched:
        factors["bias"] = PerExample.over(axis.positions(gradient))
    if not needs_input:
        return None, factors
    weight = weight if weight.dtype == gradient.dtype else weight.to(gradient.dtype)
    return times(gradient, weight.T if is_transposed else weight), factors


_LINEAR = Rule("linear", _bind_linear, _linear, _linear_backward, is_product=True, is_orderless=True)
_MATMUL = Rule("matmul", _bind_matmul, _linear, _linear_backward, is_product=True, is_orderless=True)

LINEAR: Mapping[Any, Rule] = MappingProxyType(
    {
        F.linear: _LINEAR,
        torch.addmm: Rule("addmm", _bind_addmm, _linear, _linear_backward, is_product=True),
        **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _MATMUL),
    }
)
