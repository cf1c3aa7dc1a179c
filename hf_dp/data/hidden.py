"""Positions that a row's own mask hides: they are given nothing to predict.

Attention that adds a large negative number where it must not look looks everywhere alike where it may look nowhere: a
hidden position, whose own key is hidden too, then sees the padding and whatever else is in its columns, as many as the
longest row beside it has. So do all positions of a decoder whose encoder is hidden throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses.kinds import SHIFTED, TOKENWISE, is_fed_labels, loss_kind
from hf_dp.losses.tokens import IGNORED

_ENCODED, _DECODED = "attention_mask", "decoder_attention_mask"


def mask_of(batch: Any, name: str = _ENCODED) -> Tensor | None:
    """(B, T): which positions are shown."""
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def begins(mask: Tensor) -> Tensor:
    """(B, T): before the first position that is shown; later ones, or all, that are hidden are the row's own."""
    return mask.ne(0).cumsum(1).eq(0) & mask.ne(0).any(1, keepdim=True)


def without_hidden(
    model: nn.Module, batch: Mapping[str, Any], collated: Any, *, has_usual_loss: bool = True
) -> dict[str, Tensor]:
    """The labels (B, L) without those that hidden positions of their own row predict; nothing where there are none, or
    where the loss of the model is not known token by token.

    Args:
        model: that it is for.
        batch: on the model's device.
        collated: see `on_host`.
        has_usual_loss: whether it is trained by `per_example_losses`, so that it is known what labels mean. For a loss
            of one's own a language model's first token behind padding on the left alone goes without its label.
    """
    labels, mask, decoded = batch.get("labels"), mask_of(batch), mask_of(batch, _DECODED)
    known = (on_host(batch, collated, name) for name in (_ENCODED, _DECODED))
    if not (isinstance(labels, Tensor) and labels.dim() == 2 and _may_be_ignored(labels)) or all(
        one is None or _shows_all(one) for one in known
    ):
        return {}
    try:
        kind = loss_kind(model)
    except UnsupportedModelError:
        return {}
    if not has_usual_loss and kind != SHIFTED:
        return {}
    if kind == TOKENWISE and is_fed_labels(model):
        if mask is not None:
            labels = labels.masked_fill(mask.eq(0).all(1, keepdim=True), IGNORED)
        if decoded is not None and decoded.shape == labels.shape:
            labels = labels.masked_fill(decoded.eq(0), IGNORED)
        return {"labels": labels}
    if mask is None or mask.shape != labels.shape or kind not in (SHIFTED, TOKENWISE):
        return {}
    hidden = mask.eq(0) if has_usual_loss else begins(mask)
    # Of a language model each position predicts the label behind it.
    hidden = F.pad(hidden, (1, 0), value=False)[:, :-1] if kind == SHIFTED else hidden
    return {"labels": labels.masked_fill(hidden, IGNORED)}


def on_host(batch: Any, collated: Any, name: str = _ENCODED) -> Tensor | None:
    """A mask of `batch` as it was before it was moved, if it was `collated` so: what is asked of it has not to be
    waited for."""
    mask, before = mask_of(batch, name), mask_of(collated, name)
    return mask if mask is None or before is None or before.shape != mask.shape else before


def _may_be_ignored(labels: Tensor) -> bool:
    is_whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return is_whole and torch.iinfo(labels.dtype).min <= IGNORED


def _shows_all(mask: Tensor) -> bool:
    return bool(mask.ne(0).all())
