"""Private text classification: an encoder with mean pooling and a head that starts from the labels' own names.

The head's rows start as the embeddings of the label names, which are public, so that the first private step improves
on a classifier that already works. `method: head` trains the head alone, on features that the frozen encoder computes
once (each from its own text, so that costs no privacy); `lora` trains adapters and the head, `full` everything.

The head's learning rate follows from the noise: over the whole training the noise alone would move each of the head's
weights by `head_noise` (standard deviation), whatever epsilon, the batch and the number of steps. It is at most
`learning_rate` for each label, at temperature 0.1, and grows with the temperature's square, by which a step moves
logits less: of fewer labels each has more examples that push it, and weights that ran far beyond what the noise asks
for would give probabilities that are too sure.

With `lora` and `full` the rates are those of at most 60 steps, and of more they are divided by sqrt(steps / 60): in
long trainings of small batches noise alone makes probabilities too sure (common/rates.py).

What is saved is the same classifier as Transformers has it (`AutoModelForSequenceClassification`, with tokenizer and
label names): the pooling is one more layer of the encoder, and scale and origin are in the weights
(common/plain_classifier.py).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from common.arguments import OWN_OPTIMIZER, parse
from common.classification import (
    TEMPERATURE,
    EncoderClassifier,
    MeanPoolingForSequenceClassification,
    apart,
    build,
    by_length,
    read,
    temperature,
)
from common.data import public_labels
from common.hub_names import pretrained
from common.kept_features import check_place, kept
from common.plain_classifier import as_sequence_classification, pooled
from common.rates import in_many_steps, planned_steps, within
from common.results import CLASSIFY, measured, scored_by_label, train_and_report
from hf_dp import PrivacyConfig, accounting
from hf_dp.config.asked import promised
from hf_dp.training.planned import number_of, trainings_before, unit_of, units_of

# What the rates of an encoder and its head were measured with.
_STEPS = 60


@dataclass(kw_only=True)
class RecipeArguments(EncoderClassifier):
    """What the recipe trains on, and how."""

    DECIDES_ITSELF: ClassVar = OWN_OPTIMIZER

    head_learning_rate: float = field(
        default=1e-2,
        metadata={"help": "The head's with lora and full, in up to 60 steps; learning_rate is the encoder's."},
    )
    head_noise: float = field(
        default=0.2, metadata={"help": "With head: how far the noise may move a weight of it, which sets the rate."}
    )
    features_dir: str | None = field(
        default=None,
        metadata={
            "help": "With head: keep the features of train_file there for runs at other epsilons; as private as the "
            "texts themselves."
        },
    )


@torch.no_grad()
def features(
    model: MeanPoolingForSequenceClassification,
    texts: Dataset,
    collate: Any,
    batch_size: int,
    unit: str | None,
    directory: str | None = None,
) -> Dataset:
    """The texts as rows of features and label, from the encoder as it is, beside the column of units; kept in a
    `directory`, if there is one."""
    model.eval()
    whose = {} if unit is None else {unit: list(texts[unit])}
    rows = list(texts.remove_columns(list(whose)))

    def compute() -> torch.Tensor:
        found = []
        for start in tqdm(range(0, len(rows), batch_size), desc="features"):
            batch = collate(rows[start : start + batch_size]).to(model.device)
            found.append(pooled(model.encoder, batch["input_ids"], batch["attention_mask"]).cpu())
        return torch.cat(found)

    read = ((row["input_ids"], row["attention_mask"]) for row in rows)
    computed = kept(directory, model.encoder, read, batch_size, compute, pooled)
    made = {"features": computed.numpy(), "labels": [row["labels"] for row in rows]}
    return Dataset.from_dict(made | whose).with_format("torch")


def make_optimizer(
    model: torch.nn.Module,
    recipe: RecipeArguments,
    arguments: TrainingArguments,
    privacy: PrivacyConfig,
    unit: accounting.UnitTerms,
    n: int,
) -> torch.optim.Optimizer:
    """SGD for the head alone, at the rate that its noise allows; Adam for an encoder and its head, at rates at which
    noise carries a weight no further in many steps than in few; `n` counts units."""
    head = [p for name, p in model.named_parameters() if p.requires_grad and "classifier" in name]
    body = [p for name, p in model.named_parameters() if p.requires_grad and "classifier" not in name]
    factors = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps, arguments.world_size
    # Where it is given, n is secret, and the rate must not follow from it.
    drawn = (privacy.dataset_size or n) if unit.drawn is None else unit.drawn
    batch_size, steps = math.prod(factors), planned_steps(arguments, drawn)
    if recipe.method == "head":
        # More than there are the trainer refuses, but where n is secret.
        expected = batch_size if privacy.sampling_probability else min(batch_size, drawn)
        sampling = accounting.sampling_terms(unit.drawn, expected, promised(privacy))
        earlier = trainings_before(privacy)
        delta = accounting.promised_delta(privacy, n)
        _, noise_multiplier = accounting.calibrated(
            lambda noise: sampling.event(accounting.GaussianNoise(multiplier=noise).event(), unit),
            steps=steps,
            delta=accounting.delta_after(earlier, delta, is_given=privacy.target_delta is not None),
            accountant=privacy.accountant,
            target_epsilon=privacy.target_epsilon,
            target_tpr=privacy.target_tpr,
            at_fpr=privacy.at_fpr,
            noise_multiplier=privacy.noise_multiplier,
            earlier=earlier,
        )
        noise = noise_multiplier * privacy.clipping_norm / batch_size * math.sqrt(steps)
        labels = model.classifier.out_features
        most = arguments.learning_rate * labels * (temperature(recipe, labels) / TEMPERATURE) ** 2
        rate = min(most, recipe.head_noise / max(noise, 1e-9))
        print(f"learning rate of the head: {rate:.3g}")
        return torch.optim.SGD(head, lr=rate)
    given = arguments.learning_rate, recipe.head_learning_rate / recipe.head_scale
    rates = [in_many_steps(rate, steps, _STEPS) for rate in given]
    print(f"learning rates of the encoder and of the head, in {steps} steps: {rates[0]:.3g}, {rates[1]:.3g}")
    return torch.optim.Adam([{"params": body, "lr": rates[0]}, {"params": head, "lr": rates[1]}])


def main() -> None:
    """Trains, then prints test accuracy, by group if asked for, and the privacy report."""
    recipe, arguments, privacy = parse(RecipeArguments)
    check_place(recipe.features_dir, recipe.method, str(arguments.output_dir))
    names = public_labels(recipe)
    tokenizer = pretrained(AutoTokenizer, recipe.encoder)
    tokenizer.model_max_length = recipe.max_length  # as it is trained, and saved
    files = {"train": recipe.train_file, "test": recipe.test_file}
    units = {"train": privacy.unit, "test": None}
    train, test = (by_length(read(path, at, recipe, tokenizer, names, units[at])) for at, path in files.items())
    train, test, groups = apart(train, test)
    model = build(recipe, tokenizer, names)
    padded = DataCollatorWithPadding(tokenizer)
    if recipe.method == "head":
        size = arguments.per_device_eval_batch_size
        train = features(model, train, padded, size, privacy.unit, recipe.features_dir)
    units = units_of(train, privacy)
    unit, n = unit_of(train, privacy, units), number_of(train, units)
    arguments = within(arguments, privacy, len(train) if unit.drawn is None else unit.drawn)

    def make(kind: type[Trainer], model: torch.nn.Module, **others: Any) -> Trainer:
        return kind(
            model=model,
            train_dataset=train,
            eval_dataset=test,
            processing_class=tokenizer,
            data_collator=lambda rows: (default_data_collator if "features" in rows[0] else padded)(rows),
            compute_metrics=lambda p: measured(("accuracy",), p.predictions.argmax(-1), p.label_ids),
            optimizers=(make_optimizer(model, recipe, arguments, privacy, unit, n), None),
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
        recipe=recipe,
        plain=functools.partial(as_sequence_classification, names=names),
        usage=CLASSIFY,
    )


if __name__ == "__main__":
    main()
