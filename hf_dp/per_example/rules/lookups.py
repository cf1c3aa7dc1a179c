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
    if _are_numbers(index) and index.dim():
        return Bound(index, {"weight": input}, {"axes": 1})
    several, shape = _numbers_of(index), input.shape
    if not several or not any(isinstance(one, Tensor) and one.dim() for one in several):
        raise unsupported(
            "getitem", f"an index of type {type(index).__name__}", "only tensors of row numbers are known"
        )
    # Of the first axes as one. What is looked up there raises what torch raises, and counts from the end as torch does.
    rows: Any = 0
    for one, size in zip(several, shape, strict=False):
        device = next(each.device for each in several if isinstance(each, Tensor))
        rows = rows * size + torch.arange(size, device=device)[one]
    return Bound(rows, {"weight": input}, {"axes": len(several)})


def _numbers_of(index: Any) -> list[Any]:
    """What looks up rows by numbers of the first axes; nothing, if something else is in it."""
    parts = list(index) if isinstance(index, tuple) else []
    while parts and (parts[-1] is Ellipsis or (isinstance(parts[-1], slice) and parts[-1] == slice(None))):
        parts.pop()
    are_known = all(_are_numbers(one) or (isinstance(one, int) and not isinstance(one, bool)) for one in parts)
    return parts if are_known else []


def _are_numbers(index: Any) -> bool:
    no_numbers = (torch.bool, torch.uint8)
    return isinstance(index, Tensor) and not index.is_floating_point() and index.dtype not in no_numbers


def _getitem(index: Tensor, operands: Operands) -> tuple[Tensor, Saved]:
    weight, axes = operands.needed("weight"), operands.options["axes"]
    return (weight if axes == 1 else weight.flatten(0, axes - 1))[index], (index,)


def _getitem_backward(saved: Saved, operands: Operands, gradient: Tensor, axis: Axis, needs_input: bool) -> Backward:
    (index,), weight = saved, operands.needed("weight")
    rows = weight.shape[: operands.options["axes"]].numel()
    ids = index.long().remainder(rows).reshape(axis.batch_size, -1)
    given = gradient.reshape(*ids.shape, weight.shape[operands.options["axes"] :].numel())
    return None, {"weight": Outer(OneHot(ids, rows), Dense(given))}


LOOKUPS: Mapping[Any, Rule] = MappingProxyType(
    {
        F.embedding: Rule("embedding", _bind_embedding, _embedding, _embedding_backward, features=0, is_orderless=True),
        torch.Tensor.__getitem__: Rule(
            "getitem", _bind_getitem, _getitem, _getitem_backward, features=0, is_orderless=True
        ),
    }
)
