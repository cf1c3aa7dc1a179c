"""Attention of `nn.MultiheadAttention`, which puts positions first and examples second before it uses its parameters.

With the examples first it is a few matrix products, for which there are rules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """`F.multi_head_attention_forward` of (T, B, n), as torch has it; or NotImplemented."""
    is_static = static_k is not None or static_v is not None
    if query.dim() != 3 or is_static or (is_causal and attn_mask is None):
        return NotImplemented
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if query is key is value and not use_separate_proj_weight:
        projected: Any = F.linear(query.transpose(0, 1), in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        weights = weights if use_separate_proj_weight else in_proj_weight.chunk(3)
        given = (query, key, value)
        projected = [F.linear(x.transpose(0, 1), w, b) for x, w, b in zip(given, weights, biases, strict=True)]
    more = [] if bias_k is None or bias_v is None else [(bias_k, bias_v)]
    more += [(projected[1].new_zeros(1, 1, embed_dim_to_check),) * 2] if add_zero_attn else []
    for pair in more:  # a position of no example's own
        copies = [one.expand(query.shape[1], 1, -1) for one in pair]
        projected = [projected[0], *(torch.cat(x, 1) for x in zip(projected[1:], copies, strict=True))]
        attn_mask, key_padding_mask = (m if m is None else F.pad(m, (0, 1)) for m in (attn_mask, key_padding_mask))
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in projected)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal and key_padding_mask is None and not need_weights:  # torch then looks at no mask
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    if attn_mask is not None:
        mask = _added(attn_mask, scores)
        scores = scores + (mask.view_as(scores) if mask.dim() == 3 and len(mask) > 1 else mask)
    if key_padding_mask is not None:
        scores = scores + _added(key_padding_mask, scores)[:, None, None]
    shares = scores.softmax(-1)
    mixed = F.dropout(shares, dropout_p, training) @ v
    output = F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return output, None
    return output, shares.mean(1) if average_attn_weights else shares


def _added(mask: Tensor, scores: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill(mask, float("-inf"))
