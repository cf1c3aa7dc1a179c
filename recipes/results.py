"""What recipes share at the end: metrics without a network, the same training without privacy, and a table."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import evaluate
import torch
from groups import report_by_group
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainingArguments

from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.checkpoints import newest_whole
from hf_dp.errors import ConfigurationError
from hf_dp.losses import per_example_losses

METRICS = Path(__file__).resolve().parent / "metrics"


@dataclass
class Scores:
    """How well a model does.

    Attributes:
        measures: of all examples, each by name.
        of_examples: one number for each example, of which `measure` says what it is.
    """

    measures: dict[str, float]
    of_examples: Sequence[float]
    measure: str = "accuracy"
    larger_is_better: bool = True


def measured(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Metrics by the scripts in `metrics`; what they compare stays in memory and is written nowhere."""
    found: dict[str, float] = {}
    for name in names:
        metric = evaluate.load(str(METRICS / name), keep_in_memory=True)
        found.update(metric.compute(predictions=predictions, references=references))
    return found


def scored_by_label(trainer: Trainer, data: Any) -> Scores:
    """Accuracy and macro F1 of a classifier."""
    output = trainer.predict(data)
    predicted, labels = output.predictions.argmax(-1), output.label_ids
    return Scores(measured(("accuracy", "macro_f1"), predicted, labels), (predicted == labels).astype(float).tolist())


@torch.no_grad()
def scored_by_loss(trainer: Trainer, data: Any) -> Scores:
    """Mean loss of an example, and perplexity, of a language model."""
    losses, tokens = [], []
    trainer.model.eval()
    for batch in trainer.get_eval_dataloader(data):
        counts = batch["labels"][:, 1:].ne(-100).sum(1)
        found = trainer.accelerator.gather_for_metrics((per_example_losses(trainer.model, batch), counts))
        losses += found[0].tolist()
        tokens += found[1].tolist()
    mean = {"loss": sum(losses) / len(losses)}
    return Scores({**mean, **measured(("perplexity",), losses, tokens)}, losses, "loss", larger_is_better=False)


def train_and_report(
    model: Any,
    make: Callable[..., Trainer],
    score: Callable[[Trainer], Scores],
    arguments: TrainingArguments,
    privacy: PrivacyConfig,
    *,
    groups: Sequence[str] | None = None,
    compare_without_privacy: bool = False,
) -> DPTrainer:
    """Trains privately, saves, and shows what came of it; `results.json` in the output directory says the same.

    Args:
        model: the initial model.
        make: `make(kind, model=..., args=..., **others)` is a trainer of that kind, with optimizer and data.
        score: how well a trainer's model does.
        groups: the group of each example that is scored, for a report by group.
        compare_without_privacy: train a copy of the initial model too, with the ordinary Trainer and the same
            arguments, optimizer and callbacks: as many steps of shuffled batches of the same size, with no clipping of
            examples (only max_grad_norm, which Trainer has by itself) and no noise. It is not saved: its weights are
            not private, and neither is what is said of them.
    """
    directory, checkpoint = Path(str(arguments.output_dir)), checkpoint_of(arguments)
    initial = copy.deepcopy(model) if compare_without_privacy else None
    trainer: Any = make(DPTrainer, model=model, args=arguments, privacy=privacy)
    before = score(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    after, without = score(trainer), None
    trainer.save_model()
    if initial is not None:
        aside = {"output_dir": str(directory / "without_privacy"), "save_strategy": "no", "push_to_hub": False}
        ordinary = make(Trainer, model=initial, args=replace(arguments, **aside))
        ordinary.train()
        without = score(ordinary)
    if trainer.is_world_process_zero():
        report = trainer.privacy_report()
        columns = {"before": before, f"epsilon {report.epsilon:.3g}": after}
        _show(columns if without is None else {**columns, "without privacy": without}, directory)
        if groups is not None:
            report_by_group(
                after.of_examples,
                groups,
                measure=after.measure,
                larger_is_better=after.larger_is_better,
                directory=directory,
                without_privacy=None if without is None else without.of_examples,
            )
        print(report)
    return trainer


def checkpoint_of(arguments: TrainingArguments) -> str | None:
    """The checkpoint that --resume_from_checkpoint names: a folder; with `true` the newest whole one in the output
    directory.

    Raises:
        ConfigurationError: there is none.
    """
    given = arguments.resume_from_checkpoint
    if given is None or str(given).lower() in ("", "false"):
        return None
    output = str(arguments.output_dir)
    last = str(given).lower() == "true"
    found = newest_whole(output) if last else str(given)
    if found is None or not os.path.isdir(found):
        raise ConfigurationError(
            f"--resume_from_checkpoint {given}, and no such checkpoint" + (f" in {output!r}." if last else "."),
            why="a training from the beginning would spend the budget once more.",
            fix="name a folder checkpoint-N (they are written with --save_strategy steps), or leave the option out.",
        )
    return found


def _show(columns: dict[str, Scores], directory: Path) -> None:
    table = Table("", *columns, title="result")
    for name in next(iter(columns.values())).measures:
        table.add_row(name.replace("_", " "), *(f"{scores.measures[name]:.4f}" for scores in columns.values()))
    Console().print(table)
    kept = {name: scores.measures for name, scores in columns.items()}
    (directory / "results.json").write_text(json.dumps(kept, indent=2), encoding="utf-8")
