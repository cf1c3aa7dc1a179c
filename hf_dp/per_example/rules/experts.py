"""Matrices of experts, each of which multiplies the rows that it was given: one product of groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hf_dp.per_example.gram import Dense
from hf_dp.per_example.routed import Routed
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved, unsupported
from hf_dp.per_example.waiting import answers_at_once

# How Transformers calls what it computes the same with where torch cannot: in float64, or on an older GPU.
_FALLBACK = "transformers.grouped_mm_fallback"


def _bind(
    input: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Bound:
    if input.dim() != 2 or weight.dim() != 3 or offs is None or bias is not None or out_dtype is not None:
        found = f"operands of {input.dim()} and {weight.dim()} axes"
        raise unsupported("grouped_mm", found, "known is that of rows (S, d), sorted, with matrices (E, d, p)")
    return Bound(input, {"weight": weight}, {"offsets": offs})


def _rule(grouped: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Rule:
    def forward(input: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
        offsets = operands.options["offsets"]
        return grouped(input, operands.needed("weight"), offsets), (input, offsets)

    def backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
        (given, offsets), weight = saved, operands.needed("weight")
        assert axis.order is not None
        if not len(given):
            return (torch.zeros_like(given) if needs_input else None), {"weight": None}
        ids = torch.searchsorted(offsets, axis.order.at.to(offsets.dtype), right=True)
        rows = axis.led(given), axis.spread(gradient)
        # Beyond the last expert's, which are for one on another device, there is nothing, and no numbers.
        beyond = ids == len(weight)
        if not answers_at_once(beyond.device) or bool(beyond.any()):
            rows = rows[0].masked_fill_(beyond[:, None], 0), rows[1].masked_fill_(beyond[:, None], 0)
        ids = ids.clamp_max_(len(weight) - 1).view(axis.batch_size, -1)
        left, right = (Dense(axis.positions(side)) for side in rows)
        input_gradient = grouped(gradient.contiguous(), weight.mT, offsets) if needs_input else None
        return input_gradient, {"weight": Routed(left, right, ids=ids, experts=len(weight))}

    return Rule("grouped_mm", _bind, forward, backward, is_sorted=True)


def _native(input: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    product: Tensor = torch._grouped_mm(input, matrices, offs=offsets)
    return product


def _fallback(input: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(input, matrices, offsets)
    return product


EXPERTS: Mapping[Any, Rule] = MappingProxyType({torch._grouped_mm: _rule(_native), _FALLBACK: _rule(_fallback)})
