"""Rows of a parameter that are looked up: embeddings, and the experts of each token."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.factors import Outer
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.rule import Axis, Backward, Bound, Operands, Rule, Saved, unsupported


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
        raise unsupported(
            "embedding",
            f"max_norm={max_norm}, scale_grad_by_freq={scale_grad_by_freq}",
            "the first changes weights in the forward pass, the second mixes the counts of all examples",
            fix="leave them out (embedding.max_norm = None, embedding.scale_grad_by_freq = False)",
        )
    return Bound(input, {"weight": weight}, {"padding_idx": padding_idx})


def _embedding(ids: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    return F.embedding(ids, operands.needed("weight")), (ids,)


def _embedding_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    (ids,), weight = saved, operands.needed("weight")
    padding = operands.options["padding_idx"]
    if padding is not None:
        gradient = gradient.masked_fill(ids.eq(padding % weight.shape[0]).unsqueeze(-1), 0)
    ids = ids.long().reshape(axis.batch_size, -1)
    return None, {"weight": Outer(OneHot(ids, weight.shape[0]), Dense(axis.positions(gradient)))}


def _bind_getitem(input: Tensor, index: Any) -> Bound:
    if (
        not isinstance(index, Tensor)
        or index.is_floating_point()
        or index.dtype in (torch.bool, torch.uint8)
        or not index.dim()
    ):
        raise unsupported(
            "getitem", f"an index of type {type(index).__name__}", "only a tensor of row numbers is known"
        )
    return Bound(index, {"weight": input}, {})


def _getitem(index: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    return operands.needed("weight")[index], (index,)


def _getitem_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    (index,), weight = saved, operands.needed("weight")
    ids = index.long().remainder(weight.shape[0]).reshape(axis.batch_size, -1)
    rows = gradient.reshape(axis.batch_size, ids.shape[1], -1)
    return None, {"weight": Outer(OneHot(ids, weight.shape[0]), Dense(rows))}


LOOKUPS: Mapping[Any, Rule] = MappingProxyType(
    {
        F.embedding: Rule("embedding", _bind_embedding, _embedding, _embedding_backward, features=0, is_orderless=True),
        torch.Tensor.__getitem__: Rule("getitem", _bind_getitem, _getitem, _getitem_backward, features=0),
    }
)
