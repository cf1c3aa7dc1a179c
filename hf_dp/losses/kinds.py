"""Which loss a model is trained with, as Transformers itself declares it (`loss_type` and the auto classes)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_dp.errors import UnsupportedModelError

SAY_IT = "override DPTrainer.compute_per_example_loss(model, inputs), or give PrivateRun(loss=...)"
BY_ITSELF = "hf_dp.losses.own_losses(model, inputs) gives the model's own of each by itself, in as many passes"
SHIFTED = "causal_lm"
TOKENWISE = "token"
SEGMENTATION = "semantic_segmentation"


@functools.cache
def _heads() -> tuple[tuple[str, tuple[str, ...], Mapping[str, str | Sequence[str]]], ...]:
    """Kinds of loss, how classes with each end, and what else is known to have it."""
    from transformers.models.auto import modeling_auto as auto

    return (
        (SHIFTED, ("ForCausalLM",), auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (TOKENWISE, ("ForMaskedLM",), auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        (TOKENWISE, ("ForTokenClassification",), auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        ("question_answering", ("ForQuestionAnswering",), auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
        ("classification", ("ForSequenceClassification",), auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("classification", ("ForImageClassification",), auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        ("classification", ("ForAudioClassification",), auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
        ("classification", ("ForVideoClassification",), auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES),
        (SEGMENTATION, ("ForSemanticSegmentation",), auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES),
        ("multiple_choice", ("ForMultipleChoice",), auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES),
        ("ctc", ("ForCTC",), auto.MODEL_FOR_CTC_MAPPING_NAMES),
        # With and without an encoder: what hears, and what sees, is often a decoder.
        (SHIFTED, (), auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        (SHIFTED, (), auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
        (SHIFTED, (), auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    )


def is_encoder(config: Any) -> bool:
    """Whether there is a masked language model of its type. Such models pool no last token, whatever pads."""
    from transformers.models.auto import modeling_auto as auto

    return getattr(config, "model_type", None) in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


@functools.cache
def _of_class(name: str) -> str | None:
    """The kind of loss that a class of this name has; None where it is not known."""
    for kind, suffixes, mapping in _heads():
        if name.endswith(suffixes) or any(name in _all(classes) for classes in mapping.values()):
            return kind
    return None


def loss_kind(model: nn.Module) -> str:
    """Which loss `model` is trained with: "causal_lm", "token", "classification", "question_answering",
    "multiple_choice", "ctc" or "semantic_segmentation".

    Raises:
        UnsupportedModelError: none of them.
    """
    base = base_model(model)
    # fully_shard makes a class of its own of the model's.
    name, *inherited = (kind.__name__ for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    declared = getattr(base, "loss_type", None)
    said = next((kind for kind, suffixes, _ in _heads() if declared in suffixes), None)
    # What is said of a model goes before its name, and that before what it inherits; whether it is so, its own loss
    # shows. Transformers itself says it by the name, but for models that are told otherwise.
    known = said or _of_class(name) or next(filter(None, map(_of_class, inherited)), None)
    # Transformers' own losses read it; a module that has none cannot have one of them, whatever it says.
    if (has_config := getattr(base, "config", None) is not None) and known is not None:
        # Its decoder is fed shifted labels, so that each position predicts its own.
        return TOKENWISE if known == SHIFTED and has_decoder(base) else known
    raise UnsupportedModelError(
        f"{name} (loss_type {declared!r}) has no known per-example loss.",
        why="the model's own loss is normalised over the batch, so one example would rescale its neighbours.",
        fix="where its loss is that of one of Transformers' own heads, say which: model.loss_type = "
        f"'ForSequenceClassification', for example; or {SAY_IT}, which return one loss for each example ({BY_ITSELF})."
        if has_config and not _is_for_something_else(name)
        else f'{SAY_IT}, which return one loss for each example (in torch: reduction="none"; {BY_ITSELF}).',
    )


@functools.cache
def _is_for_something_else(name: str) -> bool:
    """Whether Transformers has a class of this name for another task (detection, contrastive pairs), or without one."""
    from transformers.models.auto import modeling_auto as auto

    tables = [table for key, table in vars(auto).items() if key.endswith("_MAPPING_NAMES")]
    return any(name in _all(classes) for table in tables for classes in table.values())


def _all(classes: str | Sequence[str]) -> Sequence[str]:
    """Of the names of one kind of model's classes, of which most have one."""
    return (classes,) if isinstance(classes, str) else classes


def has_decoder(model: nn.Module) -> bool:
    """Whether a decoder reads what an encoder made."""
    return bool(getattr(getattr(base_model(model), "config", None), "is_encoder_decoder", False))


def is_fed_labels(model: nn.Module) -> bool:
    """Whether a decoder is fed the labels, moved by one: not where they are classes of the tokens that it reads."""
    classes = type(base_model(model)).__mro__
    return has_decoder(model) and not any(kind.__name__.endswith("ForTokenClassification") for kind in classes)


def base_model(model: nn.Module) -> Any:
    """The model of Transformers that PEFT may have been put around."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model
