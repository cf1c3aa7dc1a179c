"""What recipes share that hold several trainings against each other: a loss, its evaluation, a folder for each run."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.parts import re_attention
from hf_dp.parts.embeddings import token_tables

RARITIES = ("head", "middle", "tail")
Collator = Callable[[list[Any]], dict[str, Tensor]]


class LogitsTrainer(DPTrainer):
    """The loss is the cross-entropy of what the model returns, logits (B, classes) or an output that has them.

    Of logits (B, K, classes), for K labels each, it is each example's mean over those that are not negative.
    """

    def compute_per_example_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Cross-entropy (B,)."""
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        return _losses(outputs, inputs["labels"])


class VarianceControl(TrainerCallback):
    """Gives rows of the token table the noise of others, or that of their root mean square; else changes nothing.

    If either does as well as Re-Attention, the pattern of variances is not what helps.
    """

    def __init__(self, arm: str) -> None:
        self.arm = arm

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """After Re-Attention was put on the model."""
        installed = re_attention.installed(model)
        if installed is None or self.arm not in ("shuffled", "constant"):
            return
        tables = {id(table) for table in token_tables(model)}
        for table in (installed.errors[name] for name, p in model.named_parameters() if id(p) in tables):
            if self.arm == "shuffled":
                table.copy_(table[torch.randperm(len(table))])
            else:
                table.fill_(float(table.square().mean().sqrt()))


def trainer(
    model: Any, arguments: TrainingArguments, folder: Path, privacy: PrivacyConfig | None, **others: Any
) -> Trainer:
    """One that trains privately; without a promise the ordinary Trainer with the same loss, which saves nothing."""
    if arguments.resume_from_checkpoint is not None:
        raise ConfigurationError(
            f"--resume_from_checkpoint {arguments.resume_from_checkpoint}, where several trainings are compared.",
            why="one checkpoint continues one training, and each other one would spend its budget once more.",
            fix="leave it out; sequential_recommendation repeats no training that results.json in output_dir holds.",
        )
    kept = {"output_dir": str(folder), "remove_unused_columns": False}
    if privacy is not None:
        return LogitsTrainer(model=model, args=replace(arguments, **kept), privacy=privacy, **others)
    aside = {"save_strategy": "no", "push_to_hub": False}
    return Trainer(model=model, args=replace(arguments, **kept, **aside), compute_loss_func=_mean_loss, **others)


def _mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    losses = _losses(outputs, labels)
    return losses.mean() if num_items_in_batch is None else losses.mean() * labels.ge(0).sum() / num_items_in_batch


def _losses(outputs: Any, labels: Tensor) -> Tensor:
    logits, labels = _logits(outputs), labels.view(len(labels), -1)
    losses = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.flatten(), reduction="none").view(labels.shape)
    return losses.sum(1) / labels.ge(0).sum(1)


def _logits(outputs: Any) -> Tensor:
    found: Tensor = getattr(outputs, "logits", outputs)
    return found


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of tensors."""
    return {name: torch.tensor([example[name] for example in examples]) for name in examples[0]}


@torch.no_grad()
def scored(model: Any, rows: Any, batched: Collator, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (B, classes) and labels (B,) of one batch after the other, in order."""
    model.eval()
    device = next(model.parameters()).device
    for start in range(0, len(rows), batch_size):
        batch = batched([rows[i] for i in range(start, min(start + batch_size, len(rows)))])
        inputs = {name: value.to(device) for name, value in batch.items()}
        labels = inputs.pop("labels")
        yield _logits(model(**inputs)), labels


def folder_of(output: str | Path | None, run: object) -> Path:
    """Where a run saves its model and its report, so that none writes over another's."""
    return Path(str(output)) / re.sub(r"[^\w.+-]+", "_", str(run))


def percent(hits: Iterable[float]) -> list[float]:
    """1.0 and 0.0 as every table of a comparison has them."""
    return [100 * hit for hit in hits]


def refuse_unknown(flag: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuses what is not among the values of a flag.

    Raises:
        ConfigurationError: with the first of them.
    """
    unknown = next((value for value in given if value not in known), None)
    if unknown is not None:
        raise ConfigurationError(
            f"--{flag} {unknown}.", why="nothing goes by that name here.", fix=f"use {', '.join(known)}."
        )


def rarity(counts: Any) -> Any:
    """For each id 0, 1 or 2, a place in `RARITIES`, by how many of all occurrences are of more frequent ids.

    Under a third it is head, under two thirds middle, else tail; ids that occur equally often are in the same.

    Args:
        counts: array (ids,), how often each occurs in the training data.
    """
    values, place, ids = np.unique(counts, return_inverse=True, return_counts=True)
    mass = values * ids
    of_more_frequent = mass.sum() - mass.cumsum()
    return np.searchsorted([1 / 3, 2 / 3], of_more_frequent[place] / max(1, mass.sum()), side="right")


def by_rarity(train: Any, test: Any) -> list[str]:
    """The rarity of the median id of each test example (of two in the middle the more frequent).

    Args:
        train, test: arrays (examples, ids of each).
    """
    of_id = rarity(np.bincount(train.ravel(), minlength=int(test.max()) + 1))
    medians = np.sort(of_id[test], axis=1)[:, (test.shape[1] - 1) // 2]
    return [RARITIES[i] for i in medians]
