"""What recipes that classify share: an encoder with mean pooling and a head made of the labels' names, and adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from common.data import LabelledData, labelled, tell_of_cuts
from common.files import json_of
from common.hub_names import pretrained
from common.plain_classifier import TRAINING_FORM, TrainingForm, check_plain_form, pooled, seen_from, take_over
from hf_dp.errors import ConfigurationError

# Of the head alone; what its rate is bounded at.
TEMPERATURE = 0.1


@dataclass(kw_only=True)
class AdaptedClassifier(LabelledData):
    """Arguments of recipes that classify with adapters."""

    lora_rank: int = 8
    lora_targets: str | None = field(
        default=None, metadata={"help": "Layers that get adapters, commas between; PEFT's choice if left out."}
    )


@dataclass(kw_only=True)
class LabelWords(LabelledData):
    """Arguments of recipes for which a label is words."""

    verbaliser_file: str | None = field(
        default=None, metadata={"help": "JSON object: the words of each label; by default those of its name."}
    )


@dataclass(kw_only=True)
class EncoderClassifier(AdaptedClassifier):
    """Arguments of the classifier on an encoder."""

    encoder: str = field(metadata={"help": "A hub name or a directory with an encoder and its tokenizer."})
    method: Literal["head", "lora", "full"] = field(default="head", metadata={"help": "What is trained."})
    center: bool = field(
        default=False, metadata={"help": "Measure angles from the mean embedding of the label names, which is public."}
    )
    temperature: float | None = field(
        default=None,
        metadata={"help": "Logits are cosine similarities over this; by default 0.1 (of two labels 0.2), else 0.05."},
    )
    start_from: str | None = field(
        default=None,
        metadata={"help": "A model that this recipe saved, to begin from; with --after, if people are in both data."},
    )
    head_scale: float = field(
        default=1.0,
        metadata={"help": "Gradients of the head count this much more in the clipping norm, beside the encoder's."},
    )


class MeanPoolingForSequenceClassification(TrainingForm):
    """Logits from the normalised mean of the last hidden states, seen from an origin among the embeddings.

    For training: `as_sequence_classification` makes the same classifier in a form that Transformers loads.
    """

    _supports_sdpa = True

    def __init__(self, encoder: PreTrainedModel, label_embeddings: torch.Tensor, recipe: EncoderClassifier) -> None:
        encoder.config.num_labels = len(label_embeddings)
        encoder.config.problem_type = "single_label_classification"
        super().__init__(encoder.config)
        self.encoder = encoder
        self.classifier = torch.nn.Linear(label_embeddings.shape[1], len(label_embeddings), bias=False)
        self.register_buffer("origin", label_embeddings.mean(0) * recipe.center)
        self.classifier.weight.data.copy_(seen_from(self.origin, label_embeddings) / recipe.head_scale)
        self.scale = recipe.head_scale / temperature(recipe, len(label_embeddings))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """(B, T) ids, or (B, d) features computed from them before, to (B, labels) logits."""
        if features is None:
            features = pooled(self.encoder, input_ids, attention_mask)
        logits = self.classifier(seen_from(self.origin, features)) * self.scale
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def temperature(recipe: EncoderClassifier, labels: int) -> float:
    """The one that is given; else what did best with so many labels (docs/results.md): public, as they are.

    The head alone is sharper with many labels than with two, whose names say little of what is to be learnt.
    """
    if recipe.temperature is not None:
        return recipe.temperature
    if recipe.method != "head":
        return 0.05
    return 0.2 if labels == 2 else TEMPERATURE


def read(
    path: str, split: str, recipe: EncoderClassifier, tokenizer: Any, names: list[str], unit: str | None = None
) -> Dataset:
    """Texts as token ids, with label numbers, and groups, or the column of units, where they are asked for."""
    columns = labelled(path, split, recipe, names, unit)
    texts = columns.pop("text")
    parts = (texts[i : i + 1000] for i in range(0, len(texts), 1000))  # whole texts may be long
    lengths = (len(ids) for part in parts for ids in tokenizer(part, verbose=False)["input_ids"])
    tell_of_cuts(path, lengths, recipe.max_length)
    return Dataset.from_dict({**tokenizer(texts, truncation=True, max_length=recipe.max_length), **columns})


def label_words(recipe: LabelWords, names: list[str]) -> list[str]:
    """The words of each label: one or more.

    Raises:
        ConfigurationError: a label without any.
    """
    words = {name: name.replace("_", " ") for name in names}
    if recipe.verbaliser_file is not None:
        words = json_of(recipe.verbaliser_file)
    missing = [name for name in names if not isinstance(words, dict) or not str(words.get(name, "")).strip()]
    if missing:
        raise ConfigurationError(
            f"{recipe.verbaliser_file or 'the list of labels'} has no words for the label {missing[0]!r}.",
            why="it is learnt, and scored, by its words.",
            fix="give one or more words for each label.",
        )
    return [str(words[name]).strip() for name in names]


def beginnings(name: str, texts: list[str], tokenizer: Any, max_length: int, around: int) -> list[str]:
    """The texts of a file, each as far as its first tokens go; says how many are cut.

    Args:
        around: tokens that stand around a text, of `max_length` in all.

    Raises:
        ConfigurationError: nothing would be left of a text.
    """
    tokens = max_length - around
    if tokens < 1:
        raise ConfigurationError(
            f"--max_length {max_length}.",
            why=f"what stands around a text takes {around} tokens.",
            fix="raise it, or let less stand around a text.",
        )
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    made, lengths = [], []
    for text in texts:
        ends = tokenizer(text, **options)["offset_mapping"]
        lengths.append(len(ends))
        made.append(text[: ends[:tokens][-1][1] if ends else 0])
    tell_of_cuts(name, lengths, tokens)
    return made


def check_positions(model: PreTrainedModel, longest: int) -> None:
    """Refuses texts of more tokens than an encoder has positions (`ConfigurationError`)."""
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if not isinstance(table, torch.nn.Embedding):
        return
    # RoBERTa counts from the one after that of padding.
    most = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    if longest > most:
        raise ConfigurationError(
            f"texts of up to {longest} tokens with an encoder of {most} positions.",
            why="it cannot read longer texts, and nothing would cut them where the saved model is used.",
            fix=f"take --max_length {most} or less, or an encoder for longer texts.",
        )


def by_length(texts: Dataset) -> Dataset:
    """The shortest first: batches in order then hold little padding."""
    lengths = [len(ids) for ids in texts["input_ids"]]
    return texts.select(sorted(range(len(texts)), key=lengths.__getitem__))


def apart(train: Dataset, test: Dataset) -> tuple[Dataset, Dataset, list[str] | None]:
    """Both without their groups, which no model reads, and those of the test."""
    if "group" not in test.column_names:
        return train, test, None
    return train.remove_columns("group"), test.remove_columns("group"), list(test["group"])


def build(recipe: EncoderClassifier, tokenizer: Any, names: list[str]) -> torch.nn.Module:
    """The model, its head made of the label names' embeddings."""
    encoder = pretrained(AutoModel, recipe.encoder, dtype=torch.float32).eval()
    check_positions(encoder, recipe.max_length)
    batch = tokenizer([name.replace("_", " ").lower() for name in names], padding=True, return_tensors="pt")
    with torch.no_grad():
        embeddings = pooled(encoder, batch["input_ids"], batch["attention_mask"])
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # unused here; it would only collect noise
    model = MeanPoolingForSequenceClassification(encoder, embeddings, recipe)
    check_plain_form(model, names, batch)
    if recipe.start_from is not None:
        take_over(model, recipe.start_from, names, batch)
    if recipe.method == "head":
        model.encoder.requires_grad_(False)
    if recipe.method != "lora":
        return model
    return adapted(model, "classifier", recipe)


def adapted(model: PreTrainedModel, trained: str, recipe: AdaptedClassifier) -> torch.nn.Module:
    """The model with adapters of LoRA beside its module `trained`.

    Raises:
        ConfigurationError: PEFT finds no layers to adapt.
    """
    rank = recipe.lora_rank
    targets = None if recipe.lora_targets is None else recipe.lora_targets.split(",")
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, modules_to_save=[trained])
    try:
        made = get_peft_model(model, lora)
    except ValueError as error:
        linear = {name.rsplit(".")[-1] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        raise ConfigurationError(
            f"no layers to adapt in {model.config.model_type} ({error}).",
            why="nothing but the head would be trained.",
            fix=f"name layers with --lora_targets A,B; linear ones here: {', '.join(sorted(linear))}.",
        ) from error
    made.peft_config["default"].base_model_name_or_path = TRAINING_FORM
    return made
