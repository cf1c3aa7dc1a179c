"""The scores and the attention of some queries, computed once more beside the kernel, which gives neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.parts.re_attention.moments import wide


@dataclass(frozen=True)
class Scores:
    """Those of one attention module (B, H, T, S), from query, key, mask and what else its family hands on."""

    module: nn.Module
    query: Tensor
    key: Tensor
    mask: Tensor | None
    scale: float
    options: dict[str, Any]

    @property
    def is_causal(self) -> bool:
        return _is_causal(self.module, self.mask, self.query, self.options)

    def _seen(self) -> Tensor | None:
        """(B or 1, H or 1, T or 1, S): which keys each query sees, where there is a mask."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return self.mask
        return self.mask > torch.finfo(self.mask.dtype).min / 2

    def hidden(self) -> Tensor | None:
        """(B or 1, 1, S, 1): which keys no query sees, as those of padding; None without a mask."""
        seen = self._seen()
        return None if seen is None else ~seen.any(1, keepdim=True).any(2, keepdim=True).mT

    def visible(self) -> Tensor:
        """(B or 1, H or 1, T or 1): how many keys each query sees."""
        queries, keys = self.query.shape[2], self.key.shape[2]
        seen = self._seen()
        if seen is None:
            first = keys - queries + 1 if self.is_causal else keys
            step = 1 if self.is_causal else 0
            return (first + step * torch.arange(queries, device=self.query.device)).expand(1, 1, -1)
        return seen.sum(-1).clamp_min(1)

    def first(self) -> Tensor:
        """(B or 1, 1): how many queries are padding on the left, whose own keys are hidden; none where the keys are an
        encoder's, with padding of their own."""
        queries, keys = self.query.shape[2], self.key.shape[2]
        seen = self._seen()
        is_cross = getattr(self.module, "is_decoder", False) and not _looks_back(self.module, self.options)
        if seen is None or is_cross or queries > keys or (queries < keys and not seen.shape[2] > 1):
            return torch.zeros(1, 1, dtype=torch.long, device=self.query.device)
        own = seen[:, 0].expand(-1, queries, -1).diagonal(keys - queries, dim1=1, dim2=2)
        return own.int().argmax(-1, keepdim=True)

    @torch.no_grad()
    def all_attention(self) -> Tensor:
        """(B, H, T, S)."""
        return self.attention(torch.arange(self.query.shape[2], device=self.query.device)[None])

    def attention(self, rows: Tensor) -> Tensor:
        """(B, H, R, S): the attention of some queries (B or 1, R)."""
        groups = self.query.shape[1] // self.key.shape[1]
        key = self.key.repeat_interleave(groups, 1) if groups > 1 else self.key
        scores = wide(rows_of(self.query, rows) @ key.mT) * self.scale
        cap, bias = self.options.get("softcap"), self.options.get("position_bias")
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        if bias is not None:
            scores = scores + rows_of(bias.detach(), rows)
        mask = self.mask
        if mask is None and self.is_causal:
            mask = _causal(self.query.shape[2], key.shape[2], key.device).expand(1, 1, -1, -1)
        if mask is not None:
            mask = rows_of(mask, rows)
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1).nan_to_num(0.0)


def rows_of(values: Tensor, rows: Tensor) -> Tensor:
    """Some queries (B or 1, R) of (B or 1, H or 1, T or 1, ...); one that stands for all stays."""
    if values.shape[2] == 1:
        return values
    return values[:, :, rows[0]] if len(rows) == 1 else values.take_along_dim(rows[:, None, :, None], 2)


def _is_causal(module: nn.Module, mask: Tensor | None, query: Tensor, options: dict[str, Any]) -> bool:
    """Whether sdpa hides later keys without a mask."""
    return _looks_back(module, options) and mask is None and query.shape[2] > 1


def _looks_back(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether later keys are hidden, by a mask or by the kernel."""
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def additive(
    module: nn.Module, mask: Tensor | None, query: Tensor, key: Tensor, options: dict[str, Any]
) -> Tensor | None:
    """The mask that eager attention adds."""
    if mask is None:
        if not _is_causal(module, mask, query, options):
            return None
        mask = _causal(query.shape[2], key.shape[2], query.device)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
