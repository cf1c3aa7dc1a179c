"""Losses of heads that give no logits for each position: classification, question answering, and CTC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses.kinds import BY_ITSELF, SAY_IT, base_model
from hf_dp.losses.outputs import named
from hf_dp.losses.tokens import accurate


def classification(logits: Tensor, labels: Tensor, config: Any, label_smoothing: float) -> Tensor:
    """(B,): of one class, several, or numbers for each example; the config says which, or else the labels."""
    problem = config.problem_type
    if problem is None:
        if config.num_labels == 1:
            problem = "regression"
        elif labels.dtype in (torch.long, torch.int):
            problem = "single_label_classification"
        else:
            problem = "multi_label_classification"
    if problem == "single_label_classification":
        if labels.numel() != len(labels):
            raise ConfigurationError(
                f"labels of shape {tuple(labels.shape)} in whole numbers, for one of {config.num_labels} classes each.",
                why="an example of several classes has another loss than one of one class.",
                fix="give several labels of an example as floats (0.0 and 1.0), and load the model with "
                "problem_type='multi_label_classification'; or one number for each example.",
            )
        if logits.dim() == 2 and logits.shape[-1] != (count := config.num_labels):
            raise UnsupportedModelError(
                f"the model's config has num_labels={count}, and its logits have {logits.shape[-1]} numbers for each "
                "example.",
                why="the config says which classes there are, and the loss is one of these.",
                fix=f"make or load the model with num_labels={logits.shape[-1]}; of one whose head was put in by hand "
                "set model.config.num_labels, and model.num_labels where it has it.",
            )
        return F.cross_entropy(
            logits.view(-1, config.num_labels),
            labels.view(-1).long(),
            reduction="none",
            label_smoothing=label_smoothing,
        )
    refuse_smoothing(label_smoothing, f"problem type {problem}")
    if problem == "regression":
        return F.mse_loss(
            logits.view(len(labels), -1), labels.view(len(labels), -1).to(logits.dtype), reduction="none"
        ).mean(1)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").flatten(1).mean(1)


def refuse_smoothing(label_smoothing: float, what: str) -> None:
    """Refuses label smoothing for what is no cross-entropy (`ConfigurationError`)."""
    if label_smoothing:
        raise ConfigurationError(
            f"label_smoothing_factor={label_smoothing} with {what}.",
            why="smoothing is defined for cross-entropy only.",
            fix="set label_smoothing_factor=0.",
        )


def ctc_losses(base: Any, inputs: Mapping[str, Any], logits: Tensor, labels: Tensor) -> Tensor:
    """Connectionist temporal classification; labels below 0 are padding, and the padding token is the blank."""
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones(inputs[base.main_input_name].shape[:2], dtype=torch.long, device=logits.device)
    lengths = base._get_feat_extract_output_lengths(mask.sum(-1)).long()
    counted = labels.ge(0)
    targets = labels.gather(1, counted.logical_not().long().argsort(stable=True, dim=1)).clamp_min(0)
    beyond, last = targets.ge(logits.shape[-1]), logits.shape[-1] - 1
    # torch reads whatever lies there. A GPU would have to be waited for: the loss is no number there.
    if logits.device.type == "cpu" and bool(beyond.any()):
        raise IndexError(f"Target {int(targets.max())} is out of bounds: labels are below vocab_size={last + 1}.")
    log_probabilities = logits.log_softmax(-1).transpose(0, 1)
    with torch.backends.cudnn.flags(enabled=False):
        losses = F.ctc_loss(
            log_probabilities,
            targets.clamp_max(last),
            lengths,
            counted.sum(1),
            blank=base.config.pad_token_id,
            reduction="none",
            zero_infinity=base.config.ctc_zero_infinity,
        )
    losses = losses.masked_fill(beyond.any(1), torch.nan)
    return losses / counted.sum(1).clamp_min(1) if base.config.ctc_loss_reduction == "mean" else losses


def question_answering(model: nn.Module, batch: Mapping[str, Any], over_padding: bool = False) -> Tensor:
    """The mean over start and end; positions beyond the text count as none, as in Transformers.

    No answer is where the attention mask (B, T) hides the text: how far an example is padded does not change its loss.

    Args:
        over_padding: as Transformers' own, which spends probability there too.
    """
    if "start_positions" not in batch and "labels" in batch:
        raise UnsupportedModelError(
            f"{type(base_model(model)).__name__} is given 'labels', and no 'start_positions'.",
            why="its answers are classes, or texts, and the loss that is known of question answering is of spans.",
            fix=f"{SAY_IT} ({BY_ITSELF}); or give start_positions and end_positions, if its answers are spans.",
        )
    ends = [labels_of(batch, name) for name in ("start_positions", "end_positions")]
    output = model(**{k: v for k, v in batch.items() if k not in ("start_positions", "end_positions")})
    both = [named(output, name) for name in ("start_logits", "end_logits")]
    if any(logits is None or logits.dim() != 2 for logits in both):
        raise UnsupportedModelError(
            f"{type(base_model(model)).__name__} returns no start_logits (B, T).",
            why="its question answering head is of another kind.",
            fix=f"{SAY_IT} ({BY_ITSELF}).",
        )
    mask = None if over_padding else batch.get("attention_mask")
    total: Tensor | float = 0.0
    for logits, positions in zip(both, ends, strict=True):
        length = logits.shape[1]
        answers, logits = positions.view(-1).clamp(0, length), accurate(logits)
        if isinstance(mask, Tensor) and mask.shape == logits.shape:
            logits = logits.masked_fill(mask.eq(0), torch.finfo(logits.dtype).min)
            hidden = F.pad(mask.eq(0), (0, 1)).gather(1, answers[:, None])[:, 0]
            answers = answers.masked_fill(hidden, length)
        one = F.cross_entropy(logits, answers, ignore_index=length, reduction="none")
        total = total + one / 2
    assert isinstance(total, Tensor)
    return total


def labels_of(batch: Mapping[str, Any], name: str) -> Tensor:
    """The labels of this name; a batch without them is refused (`ConfigurationError`)."""
    labels = batch.get(name)
    if not isinstance(labels, Tensor):
        raise ConfigurationError(
            f"the batch has no {name!r} (it has {', '.join(sorted(map(str, batch)))}).",
            why="there is no loss without labels, and a row that has none may take away those of the rows beside it: "
            "collators go by a batch's first row.",
            fix="add the column to the dataset, for each row and nowhere None (-100 counts for nothing), rename yours "
            "to it (Trainer drops those that the model's forward does not name), or use a collator that makes it (for "
            "causal language models: DataCollatorForLanguageModeling(tokenizer, mlm=False)).",
        )
    return labels
