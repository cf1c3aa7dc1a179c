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
from torch.distributed.fsdp import FSDPModule

from hf_dp.errors import ConfigurationError, HfDpError, UnsupportedModelError

_IGNORED = -100
_SHIFTED = "causal_lm"
_TOKENWISE = "token"
# How far the model's own loss may be off, in its own precision.
_SAME = 1e-2
_DOES_NOT_KEEP_ITS_OUTPUT = (
    "_RecordedUseBackward", "ToCopyBackward0", "UnsafeViewBackward0", "AddmmBackward0", "MmBackward0", "MulBackward0",
    "DivBackward0", "AddBackward0",
)  # fmt: skip
# How many logits are worked on at a time: a few MiB, which stay in the cache.
_CHUNK = 1 << 19


def per_example_losses(model: nn.Module, batch: Mapping[str, Any], label_smoothing: float = 0.0) -> Tensor:
    """The loss of each example by itself, computed from the model's logits.

    Args:
        model: a Transformers model, or a PEFT model around one.
        batch: what the collator returns: model inputs and labels, each (B, ...).
        label_smoothing: as `TrainingArguments.label_smoothing_factor`.

    Returns:
        (B,) float32 (float64 for float64 logits): the mean over the example's own labelled positions for token
        losses, 0 where it has none.

    Raises:
        ConfigurationError: the batch has no labels.
        UnsupportedModelError: a head whose per-example loss is not known.
    """
    kind = loss_kind(model)
    if kind == "question_answering":
        return _question_answering(model, batch)
    labels = _labels(batch, "labels")
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "num_items_in_batch")}
    base = _base(model)
    if kind == _TOKENWISE and getattr(base.config, "is_encoder_decoder", False):
        inputs |= _decoder_inputs(base, batch, labels)
    logits = _accurate(model(**inputs).logits)
    if kind == _SHIFTED:
        labels = _past_the_prompt(model, labels, logits.shape[1])
        # The last position predicts nothing; shifting the labels spares a copy of the logits.
        return _token_losses(logits, F.pad(labels, (0, 1), value=_IGNORED)[:, 1:], label_smoothing)
    if kind == _TOKENWISE:
        return _token_losses(logits, labels, label_smoothing)
    if kind == "multiple_choice":
        return F.cross_entropy(logits, labels.view(-1), reduction="none", label_smoothing=label_smoothing)
    if kind == "ctc":
        _refuse_smoothing(label_smoothing, "connectionist temporal classification")
        return _ctc_losses(base, inputs, logits, labels)
    return _classification(logits, labels, base.config, label_smoothing)


def check_own_loss(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Checks, on each example of a small batch by itself, that `per_example_losses` equals the loss the model returns.

    Some models shift labels where others of the same family do not, or add a loss for their router. An own loss that is
    absent or not finite (an example without labels) is not compared.

    Raises:
        UnsupportedModelError: they differ, or the model's own cannot be computed.
    """
    rows = next(len(v) for v in batch.values() if isinstance(v, Tensor))
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    for i in range(rows):
        one = {k: v[i : i + 1] if isinstance(v, Tensor) else v for k, v in batch.items() if k != "num_items_in_batch"}
        with torch.no_grad():
            with torch.random.fork_rng(devices=devices):
                ours = float(per_example_losses(model, one))
            with torch.random.fork_rng(devices=devices):
                own = _own_loss(model, one)
        if own is None or not bool(own.isfinite()):
            continue
        if abs(ours - float(own)) > _SAME * max(1.0, abs(float(own))):
            raise UnsupportedModelError(
                f"{type(_base(model)).__name__} returns {float(own):.6g} as its loss of one example; "
                f"the per-example loss of its kind ({loss_kind(model)}) is {ours:.6g}.",
                why="it would be trained for something else than what it was made for.",
                fix="switch off auxiliary losses (output_router_logits=False), or override "
                "DPTrainer.compute_per_example_loss(model, inputs).",
            )


def _own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    try:
        return getattr(model(**batch), "loss", None)
    except (HfDpError, torch.OutOfMemoryError):
        raise
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        name, problem = type(_base(model)).__name__, f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"{name} cannot compute its own loss of one example ({problem}).",
            why="what it was made to be trained for is unknown, and so whether the per-example loss is that.",
            fix="give it all inputs that its forward pass takes with labels, or override "
            "DPTrainer.compute_per_example_loss(model, inputs).",
        ) from error


def loss_kind(model: nn.Module) -> str:
    """Which loss `model` is trained with: "causal_lm", "token", "classification", "question_answering",
    "multiple_choice" or "ctc".

    Raises:
        UnsupportedModelError: none of them.
    """
    from transformers.models.auto import modeling_auto as auto

    base = _base(model)
    # fully_shard makes a class of its own of the model's.
    name = next(kind.__name__ for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    declared = getattr(base, "loss_type", None)
    heads = (
        (_SHIFTED, ("ForCausalLM",), auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (_TOKENWISE, ("ForMaskedLM",), auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        (_TOKENWISE, ("ForTokenClassification",), auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        ("question_answering", ("ForQuestionAnswering",), auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
        ("classification", ("ForSequenceClassification",), auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("classification", ("ForImageClassification",), auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        ("classification", ("ForAudioClassification",), auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
        ("multiple_choice", ("ForMultipleChoice",), auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES),
        ("ctc", ("ForCTC",), auto.MODEL_FOR_CTC_MAPPING_NAMES),
        (_TOKENWISE, (), auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        (_SHIFTED, (), auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
    )
    for kind, suffixes, mapping in heads:
        names = {n for v in mapping.values() for n in (v if isinstance(v, (tuple, list)) else (v,))}
        if name in names or any(name.endswith(s) for s in suffixes):
            return _of_decoder(base, kind)
    for kind, suffixes, _ in heads:
        if declared in suffixes:
            return _of_decoder(base, kind)
    raise UnsupportedModelError(
        f"{name} (loss_type {declared!r}) has no known per-example loss.",
        why="the model's own loss is normalised over the batch, so one example would rescale its neighbours.",
        fix="override DPTrainer.compute_per_example_loss(model, inputs) to return one loss for each example.",
    )


def is_causal(model: nn.Module) -> bool:
    """Whether `model` is trained to predict each token from those before it, by a loss that is known."""
    try:
        return loss_kind(model) == _SHIFTED
    except UnsupportedModelError:
        return False


def _of_decoder(base: Any, kind: str) -> str:
    """An encoder-decoder feeds its decoder shifted labels, so that each position predicts its own."""
    return _TOKENWISE if kind == _SHIFTED and getattr(base.config, "is_encoder_decoder", False) else kind


def _base(model: nn.Module) -> Any:
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _decoder_inputs(base: Any, batch: Mapping[str, Any], labels: Tensor) -> dict[str, Tensor]:
    """What the decoder is fed, where the batch does not say: the labels, moved right by one."""
    if "decoder_input_ids" in batch or "decoder_inputs_embeds" in batch:
        return {}
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    # A model without that method (Whisper) moves them itself; the loss that it returns too is not used.
    return {"labels": labels} if prepare is None else {"decoder_input_ids": prepare(labels=labels)}


def _past_the_prompt(model: nn.Module, labels: Tensor, positions: int) -> Tensor:
    """`labels` with none for the positions that a soft prompt of PEFT puts in front, the last of which predicts."""
    extra = positions - labels.shape[1]
    if extra and extra == getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None):
        return F.pad(labels, (extra, 0), value=_IGNORED)
    return labels


def _labels(batch: Mapping[str, Any], name: str) -> Tensor:
    labels = batch.get(name)
    if not isinstance(labels, Tensor):
        raise ConfigurationError(
            f"the batch has no {name!r} (it has {', '.join(sorted(map(str, batch)))}).",
            why="there is no loss without labels.",
            fix="add the column to the dataset, or use a collator that makes it (for causal language models: "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)).",
        )
    return labels


def _accurate(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _token_losses(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    if logits.shape[:-1] != labels.shape:
        raise UnsupportedModelError(
            f"logits {tuple(logits.shape)} for labels {tuple(labels.shape)}.",
            why="one label for each position is needed.",
            fix="override DPTrainer.compute_per_example_loss(model, inputs), or train with LoRA.",
        )
    may_overwrite = type(logits.grad_fn).__name__ in _DOES_NOT_KEEP_ITS_OUTPUT and not _is_kept(logits)
    losses: Tensor = _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), label_smoothing, may_overwrite)  # type: ignore[no-untyped-call]
    counted = labels.ne(_IGNORED)
    return losses.view_as(labels).sum(1) / counted.sum(1).clamp_min(1)


def _is_kept(logits: Tensor) -> bool:
    """Whether another operation has kept the logits for its backward pass (a penalty on them, say)."""
    uses = getattr(logits, "_use_count", None)
    return uses is None or uses() > 1


class _CrossEntropy(torch.autograd.Function):
    """F.cross_entropy without reduction, on logits (N, V) that are large: no probabilities (N, V) are kept.

    Args:
        may_overwrite: the gradient takes the place of the logits, which nobody else has kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, label_smoothing: float, may_overwrite: bool) -> Tensor:
        rows = max(1, _CHUNK // logits.shape[1])
        normaliser = torch.cat([part.logsumexp(1) for part in logits.split(rows)])
        counted = labels.ne(_IGNORED)
        labels = labels.where(counted, 0)
        right = logits.gather(1, labels[:, None]).squeeze(1)
        losses = normaliser - right
        if label_smoothing:
            losses = (1 - label_smoothing) * losses + label_smoothing * (normaliser - logits.mean(1))
        ctx.save_for_backward(logits, labels, normaliser, counted)
        ctx.rows, ctx.label_smoothing, ctx.may_overwrite = rows, label_smoothing, may_overwrite
        return losses.where(counted, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, normaliser, counted = ctx.saved_tensors
        weights = weights.where(counted, 0.0)[:, None]
        gradient = logits.detach() if ctx.may_overwrite else torch.empty_like(logits)
        parts = (values.split(ctx.rows) for values in (logits.detach(), normaliser[:, None], weights, gradient))
        for part, shift, weight, out in zip(*parts, strict=True):
            torch.sub(part, shift, out=out).exp_()
            if ctx.label_smoothing:
                out.sub_(ctx.label_smoothing / logits.shape[1])
            out.mul_(weight)
        gradient.scatter_add_(1, labels[:, None], weights * (ctx.label_smoothing - 1))
        return gradient, None, None, None


def _classification(logits: Tensor, labels: Tensor, config: Any, label_smoothing: float) -> Tensor:
    problem = config.problem_type
    if problem is None:
        if config.num_labels == 1:
            problem = "regression"
        elif labels.dtype in (torch.long, torch.int):
            problem = "single_label_classification"
        else:
            problem = "multi_label_classification"
    if problem == "single_label_classification":
        return F.cross_entropy(
            logits.view(-1, config.num_labels),
            labels.view(-1).long(),
            reduction="none",
            label_smoothing=label_smoothing,
        )
    _refuse_smoothing(label_smoothing, f"problem type {problem}")
    if problem == "regression":
        return F.mse_loss(
            logits.view(len(labels), -1), labels.view(len(labels), -1).to(logits.dtype), reduction="none"
        ).mean(1)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").flatten(1).mean(1)


def _refuse_smoothing(label_smoothing: float, what: str) -> None:
    if label_smoothing:
        raise ConfigurationError(
            f"label_smoothing_factor={label_smoothing} with {what}.",
            why="smoothing is defined for cross-entropy only.",
            fix="set label_smoothing_factor=0.",
        )


def _ctc_losses(base: Any, inputs: Mapping[str, Any], logits: Tensor, labels: Tensor) -> Tensor:
    """Connectionist temporal classification; labels below 0 are padding, and the padding token is the blank."""
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones(inputs[base.main_input_name].shape[:2], dtype=torch.long, device=logits.device)
    lengths = base._get_feat_extract_output_lengths(mask.sum(-1)).long()
    counted = labels.ge(0)
    targets = labels.gather(1, counted.logical_not().long().argsort(stable=True, dim=1)).clamp_min(0)
    log_probabilities = logits.log_softmax(-1).transpose(0, 1)
    with torch.backends.cudnn.flags(enabled=False):
        losses = F.ctc_loss(
            log_probabilities,
            targets,
            lengths,
            counted.sum(1),
            blank=base.config.pad_token_id,
            reduction="none",
            zero_infinity=base.config.ctc_zero_infinity,
        )
    return losses / counted.sum(1).clamp_min(1) if base.config.ctc_loss_reduction == "mean" else losses


def _question_answering(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    ends = [_labels(batch, name) for name in ("start_positions", "end_positions")]
    output = model(**{k: v for k, v in batch.items() if k not in ("start_positions", "end_positions")})
    if getattr(output, "start_logits", None) is None or output.start_logits.dim() != 2:
        raise UnsupportedModelError(
            f"{type(_base(model)).__name__} returns no start_logits (B, T).",
            why="its question answering head is of another kind.",
            fix="override DPTrainer.compute_per_example_loss(model, inputs).",
        )
    total: Tensor | float = 0.0
    for logits, positions in zip((output.start_logits, output.end_logits), ends, strict=True):
        length = logits.shape[1]
        clamped = positions.view(-1).clamp(0, length)
        one = F.cross_entropy(_accurate(logits), clamped, ignore_index=length, reduction="none")
        total = total + one / 2
    assert isinstance(total, Tensor)
    return total
