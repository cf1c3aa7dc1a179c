"""Private text classification: an encoder with mean pooling and a head that starts from the labels' own names.

The head's rows start as the embeddings of the label names, which are public, so that the first private step improves
on a classifier that already works. `method: head` trains the head alone, on features that the frozen encoder computes
once (each from its own text, so that costs no privacy); `lora` trains adapters and the head, `full` everything.

The head's learning rate follows from the noise: over the whole training the noise alone would move each of the head's
weights by `head_noise` (standard deviation), whatever epsilon, the batch and the number of steps. It is at most
`learning_rate` for each label: of fewer labels each has more examples that push it, and weights that ran far beyond
what the noise asks for would give probabilities that are too sure.

What is saved is the same classifier as Transformers has it (`AutoModelForSequenceClassification`, with tokenizer and
label names): the pooling is one more layer of the encoder, and scale and origin are in the weights (plain_classifier).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from arguments import OWN_OPTIMIZER, parse
from data import LabelledData, labelled, public_labels
from datasets import Dataset
from hub_names import pretrained
from peft import LoraConfig, get_peft_model
from plain_classifier import (
    TRAINING_FORM,
    TrainingForm,
    as_sequence_classification,
    check_plain_form,
    pooled,
    seen_from,
)
from results import CLASSIFY, measured, scored_by_label, train_and_report
from tqdm.auto import tqdm
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_dp import PrivacyConfig, accounting
from hf_dp.errors import ConfigurationError


@dataclass(kw_only=True)
class AdaptedClassifier(LabelledData):
    """Arguments of recipes that classify with adapters."""

    lora_rank: int = 8
    lora_targets: str | None = field(
        default=None, metadata={"help": "Layers that get adapters, commas between; PEFT's choice if left out."}
    )


@dataclass(kw_only=True)
class RecipeArguments(AdaptedClassifier):
    """What the recipe trains on, and how."""

    DECIDES_ITSELF: ClassVar = OWN_OPTIMIZER

    encoder: str = field(metadata={"help": "A hub name or a directory with an encoder and its tokenizer."})
    method: Literal["head", "lora", "full"] = field(default="head", metadata={"help": "What is trained."})
    head_learning_rate: float = field(
        default=1e-2, metadata={"help": "The head's with lora and full; learning_rate is the encoder's."}
    )
    head_noise: float = field(
        default=0.2, metadata={"help": "With head: how far the noise may move a weight of it, which sets the rate."}
    )
    average: float = field(
        default=0.0, metadata={"help": "Decay of the moving average of weights that training ends with; 0: none."}
    )
    center: bool = field(
        default=False, metadata={"help": "Measure angles from the mean embedding of the label names, which is public."}
    )
    temperature: float = field(default=0.05, metadata={"help": "Logits are cosine similarities over this."})
    head_scale: float = field(
        default=1.0,
        metadata={"help": "Gradients of the head count this much more in the clipping norm, beside the encoder's."},
    )


class MeanPoolingForSequenceClassification(TrainingForm):
    """Logits from the normalised mean of the last hidden states, seen from an origin among the embeddings.

    For training: `as_sequence_classification` makes the same classifier in a form that Transformers loads.
    """

    _supports_sdpa = True

    def __init__(self, encoder: PreTrainedModel, label_embeddings: torch.Tensor, recipe: RecipeArguments) -> None:
        encoder.config.num_labels = len(label_embeddings)
        encoder.config.problem_type = "single_label_classification"
        super().__init__(encoder.config)
        self.encoder = encoder
        self.classifier = torch.nn.Linear(label_embeddings.shape[1], len(label_embeddings), bias=False)
        self.register_buffer("origin", label_embeddings.mean(0) * recipe.center)
        self.classifier.weight.data.copy_(seen_from(self.origin, label_embeddings) / recipe.head_scale)
        self.scale = recipe.head_scale / recipe.temperature

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


class MovingAverage(TrainerCallback):
    """Ends training with an exponential moving average of the weights, which are private; resumed, it restarts."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.averages = [(p, p.detach().clone()) for p in model.parameters() if p.requires_grad]

    @torch.no_grad()
    def on_step_end(self, *_: Any, **__: Any) -> None:
        for weight, average in self.averages:
            average.lerp_(weight, 1 - self.decay)

    @torch.no_grad()
    def on_train_end(self, *_: Any, **__: Any) -> None:
        for weight, average in self.averages:
            weight.copy_(average)


def read(path: str, split: str, recipe: RecipeArguments, tokenizer: Any, names: list[str]) -> Dataset:
    """Texts as token ids, with label numbers, and groups where they are asked for."""
    columns = labelled(path, split, recipe, names)
    return Dataset.from_dict(
        {**tokenizer(columns.pop("text"), truncation=True, max_length=recipe.max_length), **columns}
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


def build(recipe: RecipeArguments, tokenizer: Any, names: list[str]) -> torch.nn.Module:
    """The model, its head made of the label names' embeddings."""
    encoder = pretrained(AutoModel, recipe.encoder, dtype=torch.float32).eval()
    batch = tokenizer([name.replace("_", " ").lower() for name in names], padding=True, return_tensors="pt")
    with torch.no_grad():
        embeddings = pooled(encoder, batch["input_ids"], batch["attention_mask"])
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # unused here; it would only collect noise
    model = MeanPoolingForSequenceClassification(encoder, embeddings, recipe)
    check_plain_form(model, names, batch)
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


@torch.no_grad()
def features(model: MeanPoolingForSequenceClassification, texts: Dataset, collate: Any, batch_size: int) -> Dataset:
    """The texts as rows of features and label, from the encoder as it is."""
    model.eval()
    rows, found = list(texts), []
    for start in tqdm(range(0, len(rows), batch_size), desc="features"):
        batch = collate(rows[start : start + batch_size]).to(model.device)
        found.append(pooled(model.encoder, batch["input_ids"], batch["attention_mask"]).cpu())
    made = {"features": torch.cat(found).numpy(), "labels": [row["labels"] for row in rows]}
    return Dataset.from_dict(made).with_format("torch")


def make_optimizer(
    model: torch.nn.Module, recipe: RecipeArguments, arguments: TrainingArguments, privacy: PrivacyConfig, n: int
) -> torch.optim.Optimizer:
    """SGD for the head alone, at the rate that its noise allows; Adam for an encoder and its head."""
    head = [p for name, p in model.named_parameters() if p.requires_grad and "classifier" in name]
    body = [p for name, p in model.named_parameters() if p.requires_grad and "classifier" not in name]
    if recipe.method == "head":
        factors = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps, arguments.world_size
        batch_size = math.prod(factors)
        steps = arguments.max_steps
        if steps <= 0:
            steps = math.ceil(arguments.num_train_epochs * math.ceil(n / batch_size))
        accounting.check_steps(steps)
        noise_multiplier = privacy.noise_multiplier
        if noise_multiplier is None:
            noise_multiplier = accounting.calibrate_noise_multiplier(
                target_epsilon=privacy.target_epsilon,
                target_delta=privacy.target_delta or accounting.default_delta(n),
                sampling_probability=min(1.0, batch_size / n),
                steps=steps,
                accountant=privacy.accountant,
            )
        noise = noise_multiplier * privacy.clipping_norm / batch_size * math.sqrt(steps)
        labels = model.classifier.out_features
        rate = min(arguments.learning_rate * labels, recipe.head_noise / max(noise, 1e-9))
        print(f"learning rate of the head: {rate:.3g}")
        return torch.optim.SGD(head, lr=rate)
    return torch.optim.Adam(
        [
            {"params": body, "lr": arguments.learning_rate},
            {"params": head, "lr": recipe.head_learning_rate / recipe.head_scale},
        ]
    )


def main() -> None:
    """Trains, then prints test accuracy, by group if asked for, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    tokenizer = pretrained(AutoTokenizer, recipe.encoder)
    tokenizer.model_max_length = recipe.max_length  # as it is trained, and saved
    names = public_labels(recipe)
    files = {"train": recipe.train_file, "test": recipe.test_file}
    train, test = (by_length(read(path, split, recipe, tokenizer, names)) for split, path in files.items())
    train, test, groups = apart(train, test)
    model = build(recipe, tokenizer, names)
    padded = DataCollatorWithPadding(tokenizer)
    if recipe.method == "head":
        train = features(model, train, padded, arguments.per_device_eval_batch_size)

    def make(kind: type[Trainer], model: torch.nn.Module, **others: Any) -> Trainer:
        return kind(
            model=model,
            train_dataset=train,
            eval_dataset=test,
            processing_class=tokenizer,
            data_collator=lambda rows: (default_data_collator if "features" in rows[0] else padded)(rows),
            compute_metrics=lambda p: measured(("accuracy",), p.predictions.argmax(-1), p.label_ids),
            optimizers=(make_optimizer(model, recipe, arguments, privacy, len(train)), None),
            callbacks=[MovingAverage(recipe.average)] if recipe.average else [],
            **others,
        )

    train_and_report(
        model,
        make,
        lambda trainer: scored_by_label(trainer, test),
        arguments,
        privacy,
        groups=groups,
        compare_without_privacy=recipe.compare_without_privacy,
        plain=functools.partial(as_sequence_classification, names=names),
        usage=CLASSIFY,
    )


if __name__ == "__main__":
    main()
