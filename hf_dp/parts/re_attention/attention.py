"""The attention function: each score less half the variance that noise in the key gives it.

A noisy key K_j = k_j + e_j makes E[exp(s q K_j)] = exp(s q k_j) exp(v_j / 2) with v_j = s^2 sum_d q_d^2 Var(K_jd), so
noisier keys draw attention that is not theirs (Ding et al. 2024, arXiv:2405.18194). -v_j / 2 is linear in q^2: with
q^2 appended to the query and -(s / 2) Var(K_j) to the key, any kernel computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_dp.errors import UnsupportedModelError
from hf_dp.parts.re_attention.moments import Variance, wide
from hf_dp.parts.re_attention.scores import Scores, additive, rows_of

NAME = "re_attention"
# Where features share a variance, the attention of the first so many queries of an example is computed again, and of
# later ones that of each that is twice as far. What lies beside an example in its batch must not change the choice.
_QUERIES = 16


@dataclass(frozen=True)
class KeyNoise:
    """Variances of the keys (B, H, S, d), and of the values (B, H, S, d') where outputs are followed; the last axis is
    1 where features share one."""

    keys: Tensor
    values: Variance | None

    def without(self, hidden: Tensor) -> KeyNoise:
        """None in hidden keys (B or 1, 1, S, 1). A padding token's row may be all zeros: a normalisation makes any
        noise in it as long as a token, each layer more so, until it is infinite, and 0 x infinity reaches others."""

        def without(variance: Tensor) -> Tensor:
            return variance.masked_fill(hidden, 0.0)

        return KeyNoise(without(self.keys), None if self.values is None else self.values.each(without))


# Told the attention (B, H, T, S) of each layer without the correction, and with it.
Listener = Callable[[Tensor, Tensor], None]


class Owner(Protocol):
    """What knows the noise of an attention module's keys."""

    def key_noise(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyNoise | None: ...

    def note_correction(self, module: nn.Module, of_heads: Tensor) -> None: ...

    def note_output(self, output: Tensor, noise: Variance) -> None: ...

    def unfollowed(self) -> Any: ...

    @property
    def before(self) -> str: ...

    @property
    def listener(self) -> Listener | None: ...


OWNERS: WeakKeyDictionary[nn.Module, Owner] = WeakKeyDictionary()


def register() -> None:
    """Makes the implementation known to Transformers, for attention and for masks."""
    AttentionInterface.register(NAME, re_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def re_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As Transformers' sdpa attention (eager where scores are capped), with corrected scores.

    Args:
        module: whose owner knows the noise; without one, or without noise, this is ordinary attention.
        query: (B, H, T, d).
        key: (B, H or fewer, S, d).
        value: (B, H or fewer, S, d').
        attention_mask: as sdpa takes it, or None.
        dropout: of the attention weights.
        scaling: s; by default d ** -0.5.
        **kwargs: of the model family, handed on.

    Returns:
        (B, T, H, d'), and the weights where the kernel gives them.
    """
    if kwargs.get("s_aux") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has attention sinks.",
            why="Re-Attention's kernels would leave them out.",
            fix="leave re_attention out of PrivacyConfig for this model family.",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    forward: Any = sdpa_attention_forward
    owner = OWNERS.get(module)
    # Some versions of Transformers cap scores in eager attention alone; off, it must be the attention it was.
    if kwargs.get("softcap") is not None and (owner is None or owner.before == "eager"):
        forward = sys.modules[type(module).__module__].eager_attention_forward
        attention_mask = additive(module, attention_mask, query, key, kwargs)
    noise = None if owner is None else owner.key_noise(module, query, key, value)
    plain = Scores(module, query.detach(), key.detach(), attention_mask, scale, kwargs)
    if owner is None or noise is None:
        if owner is not None and owner.listener is not None:
            owner.listener(plain.all_attention(), plain.all_attention())
        with nullcontext() if owner is None else owner.unfollowed():
            return forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs)  # type: ignore[no-any-return]
    with owner.unfollowed():
        hidden = plain.hidden()
        noise = noise if hidden is None else noise.without(hidden)
        squares = query.square()
        squares = squares.sum(-1, keepdim=True) if noise.keys.shape[-1] == 1 else squares
        owner.note_correction(module, _corrections(squares.detach(), noise.keys, hidden, scale))
        spare = _spare(query.shape[-1] + squares.shape[-1], query.device)
        longer_query = F.pad(torch.cat([query, squares], -1), (0, spare))
        longer_key = F.pad(torch.cat([key, (-scale / 2 * noise.keys).to(key.dtype)], -1), (0, spare))
        has_mean = noise.values is not None and noise.values.own.shape[-1] == 1
        # The mean of the values' noise comes for nothing, as one more feature; kernels want one width for all three.
        wide = value
        if has_mean and noise.values is not None:
            wide = torch.cat([value, noise.values.own.to(value.dtype)], -1)
        wide = F.pad(wide, (0, max(0, longer_key.shape[-1] - wide.shape[-1])))
        output, weights = forward(
            module, longer_query, longer_key, wide, attention_mask, dropout=dropout, scaling=scale, **kwargs
        )
        width = value.shape[-1]
        result = output[..., :width]
        scores = Scores(module, longer_query.detach(), longer_key.detach(), attention_mask, scale, kwargs)
        if owner.listener is not None:
            owner.listener(plain.all_attention(), scores.all_attention())
        if noise.values is not None:
            with torch.no_grad():
                mean = output.detach()[..., width] if has_mean else None
                owner.note_output(result, _output_noise(scores, noise.values, mean))
    return result, weights


def _spare(features: int, device: torch.device) -> int:
    """How many features without an effect make the kernels of a GPU take these: with a mask, whole eights only."""
    return 0 if device.type == "cpu" else -features % 8


@torch.no_grad()
def _corrections(squares: Tensor, noise: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """(B, heads of keys): the mean of v_j / 2 over all pairs of a query and a key that is not hidden from all."""
    grouped = wide(squares).mean(2).unflatten(1, (noise.shape[1], -1)).mean(2)
    count = noise.shape[2] if hidden is None else (~hidden).sum(2).clamp_min(1)
    found: Tensor = scale**2 / 2 * (grouped * noise.sum(2) / count).sum(-1)
    return found


def _output_noise(scores: Scores, values: Variance, mean: Tensor | None) -> Variance:
    """Of sum_j a_j V_j, (B, T, H, d'), or (B, T, 1, 1) where features share one; most keys of one query are those of
    the next, so all of it counts as shared.

    Own noise adds up as sum_j a_j^2 Var(V_j). Of shared noise the part of an earlier position that a later one has is
    the later one's variance, since later averages are over more: the sum over pairs of a_i a_j Var(V_max(i, j)).

    Where features share a variance, this is done for a few queries. In between, sum_j a_j^2 is taken in proportion to
    1 / the number of keys that a query sees, and the noise that was shared before as that of the last of the few.
    Nothing depends on a later position, or on padding.
    """
    queries = scores.query.shape[2]
    groups = scores.query.shape[1] // values.own.shape[1]
    if mean is None:
        attention = scores.all_attention()
        total = attention.square() @ values.own.repeat_interleave(groups, 1)
        if values.shared is not None:
            total = total + _pairs(attention) @ values.shared.repeat_interleave(groups, 1)
        return _of_average(total.transpose(1, 2))
    positions = torch.arange(queries, device=values.own.device)
    chosen = positions[(positions < _QUERIES) | (positions + 1).log2().frac().eq(0)]
    first = scores.first()
    rows = (first + chosen).clamp_max(queries - 1)
    visible = scores.visible().to(mean.dtype)
    attention = scores.attention(rows)
    concentration = attention.square().sum(-1) * rows_of(visible[..., None], rows)[..., 0]
    # 0 for padding on the left, of which nothing is computed.
    last = torch.searchsorted(chosen, positions - first, right=True)[:, None]
    total = mean.transpose(1, 2) * F.pad(concentration, (1, 0), value=1.0).take_along_dim(last, -1) / visible
    if values.shared is not None:
        common = (_pairs(attention) @ values.shared.repeat_interleave(groups, 1))[..., 0]
        total = total + F.pad(common, (1, 0)).take_along_dim(last, -1)
    return _of_average(total.mean(1)[..., None, None])


def _pairs(attention: Tensor) -> Tensor:
    """a_j (a_j + 2 sum of a_i over i < j): how much of Var(V_j) the pairs have of which j is the later one."""
    return attention * (2 * attention.cumsum(-1) - attention)


def _of_average(variance: Tensor) -> Variance:
    return Variance(torch.zeros((), dtype=variance.dtype, device=variance.device).expand(variance.shape), variance)
