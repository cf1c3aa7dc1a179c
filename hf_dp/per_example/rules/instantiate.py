"""A rule for any operation, from the function alone: each example's gradient is formed by vmap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved

Function = Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Tensor]


def instantiating(name: str, bind: Callable[..., Bound], function: Function, *, features: int = 1) -> Rule:
    """A rule that forms each example's gradient: B times the memory of the parameters, where `Outer` needs far less.

    Args:
        name: the operation's name in messages and certificates.
        bind: takes the operation's own arguments and sorts them into a `Bound`.
        function: `function(input, parameters by role, options) -> output`, differentiable and not random. Rows of the
            output depend on the same rows of the input alone.
        features: number of trailing axes of the input that are not example or position axes.
    """

    def forward(given: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
        return function(given, operands.parameters, operands.options), (given,)

    def backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
        roles, given = sorted(operands.watched), [saved[0], *operands.parameters.values()]
        dtypes = [value.dtype for value in given if value is not None and value.is_floating_point()]
        # Under autocast weights are in more bits than what a layer before gave, and kernels take one type alone.
        common = functools.reduce(torch.promote_types, dtypes)
        all_parameters = {role: _lifted(value, common) for role, value in operands.parameters.items()}

        def one(given: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
            def with_parameters(parameters: dict[str, Tensor], given: Tensor = given) -> Tensor:
                return function(given, {**all_parameters, **parameters}, operands.options)

            watched = {role: all_parameters[role] for role in roles}
            primals = (watched, given) if needs_input else (watched,)
            output, pull = torch.func.vjp(with_parameters, *primals)[:2]
            found = pull(gradient.to(output.dtype))
            return *(found[0][role] for role in roles), *found[1:]

        rows = axis.rows(_lifted(saved[0], common)), axis.rows(gradient)
        try:
            found = torch.func.vmap(one)(*rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a kernel takes one example, and not all at once; what vmap refuses, it refuses again
            found = torch.func.vmap(one, chunk_size=1)(*rows)
        factors: dict[str, Factors | None] = {r: PerExample(g) for r, g in zip(roles, found, strict=False)}
        return found[-1].reshape(saved[0].shape) if needs_input else None, factors

    return Rule(name, bind, forward, backward, features, reads_parameters=True)


def _lifted(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
