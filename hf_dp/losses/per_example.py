"""Per-example losses (B,): no denominator is shared between examples.

Each equals the model's own loss on that one example. Which loss a model uses is read from what Transformers itself
declares (`loss_type` and the auto classes), not from its class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.losses.heads import classification, ctc_losses, labels_of, question_answering, refuse_smoothing
from hf_dp.losses.kinds import SEGMENTATION, SHIFTED, TOKENWISE, base_model, is_encoder, is_fed_labels, loss_kind
from hf_dp.losses.outputs import logits_of
from hf_dp.losses.pixels import segmentation
from hf_dp.losses.tokens import IGNORED, accurate, token_losses


def per_example_losses(model: nn.Module, batch: Mapping[str, Any], label_smoothing: float = 0.0) -> Tensor:
    """The loss of each example by itself, computed from the model's logits.

    Args:
        model: a Transformers model, or a PEFT model around one.
        batch: what the collator returns: model inputs and labels, each (B, ...).
        label_smoothing: as `TrainingArguments.label_smoothing_factor`.

    Returns:
        (B,) float32 (float64 for float64 logits): the mean over the example's own labelled positions, or pixels, for
        losses of each, 0 where it has none; of other losses 0 where an example is `left_out`.

    Raises:
        ConfigurationError: the batch has no labels.
        UnsupportedModelError: a head whose per-example loss is not known.
    """
    kind = loss_kind(model)
    if kind == "question_answering":
        return question_answering(model, batch)
    labels = labels_of(batch, "labels")
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "num_items_in_batch")}
    base = base_model(model)
    if kind == TOKENWISE and is_fed_labels(base):
        inputs |= _decoder_inputs(base, batch, labels)
    logits = logits_of(model, inputs)
    if kind == SHIFTED:
        return token_losses(logits, next_token_labels(model, labels, logits.shape[1]), label_smoothing)
    if kind == TOKENWISE:
        return token_losses(logits, labels, label_smoothing)
    logits, is_left_out = accurate(logits), left_out(model, batch)
    if kind == "multiple_choice":
        losses = F.cross_entropy(logits, labels.view(-1), reduction="none", label_smoothing=label_smoothing)
    elif kind == "ctc":
        refuse_smoothing(label_smoothing, "connectionist temporal classification")
        losses = ctc_losses(base, inputs, logits, labels)
    elif kind == SEGMENTATION:
        refuse_smoothing(label_smoothing, "semantic segmentation")
        losses = segmentation(logits, labels, base.config)
    else:
        losses = classification(logits, labels, base.config, label_smoothing)
    return losses if is_left_out is None else losses.masked_fill(is_left_out, 0.0)


def left_out(model: nn.Module, batch: Mapping[str, Any]) -> Tensor | None:
    """(B,) whether an example adds nothing, where its losses are not token by token: its mask hides all of it, or one
    of its choices, less than a frame of a recording is heard, or what a decoder pools is hidden. What a model makes of
    it may be what is beside it. None where no mask says so.
    """
    kind, base, mask, found = loss_kind(model), base_model(model), batch.get("attention_mask"), None
    # With more axes 0 may be what is shown: such masks are added to scores.
    if isinstance(mask, Tensor) and mask.dim() == (3 if kind == "multiple_choice" else 2):
        shown, frames_of = mask.ne(0).sum(-1), getattr(base, "_get_feat_extract_output_lengths", None)
        frames_of = None if kind in (SHIFTED, TOKENWISE) else frames_of  # which some have for one recording alone
        shown = shown if frames_of is None else frames_of(shown)
        found = shown.le(0).view(len(mask), -1).any(1)
    # Decoders pool the last token that is not of this number, and of none the first position: padding, where there is.
    of_text: Any = getattr(base.config, "get_text_config", lambda: base.config)()
    pad, ids = getattr(of_text, "pad_token_id", None), batch.get("input_ids")
    is_pooled_last = kind == "classification" and not is_encoder(base.config)
    if is_pooled_last and isinstance(ids, Tensor) and ids.dim() == 2 and isinstance(pad, int):
        places = torch.arange(ids.shape[1], device=ids.device)
        last = places.expand_as(ids).masked_fill(ids.eq(pad), -1).amax(1, keepdim=True)
        pooled = last[:, 0].lt(0)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            pooled = pooled | mask.gather(1, last.clamp_min(0))[:, 0].eq(0)
        found = pooled if found is None else found | pooled
    return found


def _decoder_inputs(base: Any, batch: Mapping[str, Any], labels: Tensor) -> dict[str, Tensor]:
    """What the decoder is fed, where the batch does not say: the labels, moved right by one."""
    if "decoder_input_ids" in batch or "decoder_inputs_embeds" in batch:
        return {}
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    # mBART looks for the last token of each row, and fails where there is none.
    labels = labels.masked_fill(labels.eq(IGNORED).all(1, keepdim=True), 1 if base.config.pad_token_id == 0 else 0)
    # A model without that method (Whisper) moves them itself; the loss that it returns too is not used.
    return {"labels": labels} if prepare is None else {"decoder_input_ids": prepare(labels=labels)}


def next_token_labels(model: nn.Module, labels: Tensor, positions: int) -> Tensor:
    """What each of `positions` predicts, of labels (B, T): the label after it.

    A soft prompt of PEFT puts positions in front, the last of which predicts; the last of all predicts nothing.
    """
    extra = positions - labels.shape[1]
    if extra and extra == getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None):
        labels = F.pad(labels, (extra, 0), value=IGNORED)
    # Shifting the labels spares a copy of the logits.
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
