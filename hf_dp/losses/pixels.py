"""The loss of semantic segmentation: a class for each pixel."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses.kinds import BY_ITSELF, SAY_IT

# What configurations call the label of pixels that are not counted, and what it is where none says.
_IGNORED, _NOT_COUNTED = ("semantic_loss_ignore_index", "loss_ignore_index"), 255


def segmentation(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """(B,): the mean over an example's own labelled pixels, of logits (B, C, h, w) enlarged to labels (B, H, W).

    Of one class, as in SegFormer, it is that over all of them, to which those without a label add nothing.

    Raises:
        ConfigurationError: labels that are no such.
        UnsupportedModelError: logits that are no such; or the model's own loss has a term of logits that it returns to
            nobody.
    """
    if labels.dim() != 3 or labels.is_floating_point():
        raise ConfigurationError(
            f"labels of shape {tuple(labels.shape)} and type {labels.dtype}, for semantic segmentation.",
            why="each pixel of an example has a class, or the number that counts for nothing.",
            fix="give each row a map of whole numbers (H, W), of one size in all rows of a batch.",
        )
    if getattr(config, "use_auxiliary_head", False):
        raise UnsupportedModelError(
            "a model with an auxiliary head, whose output it does not return.",
            why="its own loss has a term of that, normalised over the batch.",
            fix=f"load it with use_auxiliary_head=False; or {SAY_IT} ({BY_ITSELF}).",
        )
    if logits.dim() != 4:
        raise UnsupportedModelError(
            f"logits of shape {tuple(logits.shape)}, for semantic segmentation.",
            why="classes (B, C, h, w) of places are needed.",
            fix=f"{SAY_IT}.",
        )
    found = (getattr(config, name, None) for name in _IGNORED)
    ignored = next((number for number in found if number is not None), _NOT_COUNTED)
    enlarged = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    is_counted = labels.ne(ignored)
    if logits.shape[1] == 1:
        wanted = labels.to(enlarged.dtype)
        losses = F.binary_cross_entropy_with_logits(enlarged.squeeze(1), wanted, reduction="none")
        return losses.masked_fill(~(is_counted & labels.ge(0)), 0.0).flatten(1).mean(1)
    losses = F.cross_entropy(enlarged, labels.long(), ignore_index=ignored, reduction="none")
    return losses.flatten(1).sum(1) / is_counted.flatten(1).sum(1).clamp_min(1)
