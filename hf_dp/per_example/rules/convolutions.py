"""Convolutions: at each place a product of one patch of the input (transposed, of the output) with the weight.

So the factors are those of `F.linear`, on patches. Where channels are in groups, each example's gradient is formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
import torch.nn.grad
from torch import Tensor

from hf_dp.per_example.factors import Factors, Outer, PerExample
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved
from hf_dp.per_example.rules.instantiate import instantiating


def _bind(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Bound:
    padding = 0 if padding == "valid" else padding
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return Bound(input, {"weight": weight, "bias": bias}, options)


def _bind_transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Bound:
    bound = _bind(input, weight, bias, stride, padding, dilation, groups)
    return bound._replace(options={**bound.options, "output_padding": output_padding})


def _patches(
    values: Tensor, kernel: Sequence[int], places: Sequence[int], along: Mapping[str, Sequence[int]]
) -> Tensor:
    """(B, places, channels x kernel) of (B, channels, ...)."""
    if any(along["padding"]):
        values = F.pad(values, [p for p in reversed(along["padding"]) for _ in range(2)])
    for axis, (size, stride, dilation) in enumerate(zip(kernel, along["stride"], along["dilation"], strict=True), 2):
        windows = values.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        # What pads the output of a transposed convolution may leave room for more of them.
        values = windows.narrow(axis, 0, places[axis - 2])
    values = values.movedim(1, 1 + len(kernel))
    return values.reshape(len(values), math.prod(places), -1)


def _convolution(function: Any, bind: Callable[..., Bound], axes: int, adjoint: Any = None) -> Rule:
    """Of this many axes.

    Args:
        function: as torch has it.
        bind: takes its arguments.
        axes: along which it goes.
        adjoint: of a transposed one, the convolution that it is the transpose of.
    """

    def convolved(x: Tensor, parameters: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
        output: Tensor = function(x, parameters["weight"], parameters["bias"], **options)
        return output

    usual = instantiating(function.__name__, bind, convolved, features=axes + 1)

    def backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
        if operands.options["groups"] != 1 or isinstance(operands.options["padding"], str):
            return usual.backward(saved, operands, gradient, axis, needs_input)
        (x,), weight, factors = saved, operands.needed("weight"), dict[str, Factors | None]()
        given = {name: operands.options[name] for name in ("stride", "padding", "dilation")}
        along = {k: [v] * axes if isinstance(v, int) else list(v) * (axes // len(v)) for k, v in given.items()}
        if "weight" in operands.watched:
            one, other = (gradient, x) if adjoint is None else (x, gradient)
            patches = _patches(accumulation(other), weight.shape[2:], one.shape[2:], along)
            factors["weight"] = Outer(Dense(axis.positions(one.flatten(2).mT)), Dense(axis.positions(patches)))
        if "bias" in operands.watched:
            factors["bias"] = PerExample.over(axis.positions(gradient.flatten(2).mT))
        if not needs_input:
            return None, factors
        weight = weight.to(gradient.dtype)
        if adjoint is None:
            found: Tensor = getattr(torch.nn.grad, f"conv{axes}d_input")(x.shape, weight, gradient, **along)
            return found, factors
        found = adjoint(gradient, weight, None, **along)
        for k, size in enumerate(x.shape[2:], 2):
            found = found.narrow(k, 0, size)
        return found, factors

    return replace(usual, backward=backward)


CONVOLUTIONS: Mapping[Any, Rule] = MappingProxyType(
    {
        F.conv1d: _convolution(F.conv1d, _bind, 1),
        F.conv2d: _convolution(F.conv2d, _bind, 2),
        F.conv3d: _convolution(F.conv3d, _bind, 3),
        F.conv_transpose1d: _convolution(F.conv_transpose1d, _bind_transposed, 1, F.conv1d),
        F.conv_transpose2d: _convolution(F.conv_transpose2d, _bind_transposed, 2, F.conv2d),
        F.conv_transpose3d: _convolution(F.conv_transpose3d, _bind_transposed, 3, F.conv3d),
    }
)
