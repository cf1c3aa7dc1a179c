"""What recipes share at the end: metrics without a network, the same training without privacy, and a table."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import evaluate
import torch
from rich.console import Console
from rich.table import Table
from transformers import Trainer, TrainerCallback, TrainingArguments

from common.arguments import TextArguments
from common.groups import report_by_group
from common.moving_average import MovingAverage
from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.figures import upper
from hf_dp.hub import CARD_FILE
from hf_dp.losses import per_example_losses
from hf_dp.training.resuming.checkpoints import newest_whole

# How what was saved is used, in plain Transformers.
CLASSIFY = """from transformers import pipeline
classify = pipeline("text-classification", DIRECTORY, truncation=True)
print(classify("A text."))"""
# An adapter's tokenizer would be taken from its base model.
CONTINUE = """from transformers import pipeline
continue_ = pipeline("text-generation", DIRECTORY, tokenizer=DIRECTORY, max_new_tokens=20)
print(continue_(PROMPT))"""
# Over whole weights adapters would meet others than those that they were trained on.
_FOUR_BITS = """max_new_tokens=20, model_kwargs={"quantization_config": BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="float32")})"""
_USAGE = "## How to use it"
METRICS = Path(__file__).resolve().parent / "metrics"


@dataclass
class Scores:
    """How well a model does.

    Attributes:
        measures: of all examples, each by name.
        of_examples: one number for each example, of which `measure` says what it is.
        said: what the model says to a few prompts.
    """

    measures: dict[str, float]
    of_examples: Sequence[float]
    measure: str = "accuracy"
    larger_is_better: bool = True
    said: dict[str, str] = field(default_factory=dict)


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


class _Untrained(TrainerCallback):
    """Scores the model where training begins, when what would refuse it has been asked."""

    def __init__(self, score: Callable[[], Scores]) -> None:
        self._score = score

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.scores = self._score()


def train_and_report(
    model: Any,
    make: Callable[..., Trainer],
    score: Callable[[Trainer], Scores],
    arguments: TrainingArguments,
    privacy: PrivacyConfig,
    *,
    recipe: TextArguments,
    usage: str,
    plain: Callable[[Any], Any] | None = None,
    groups: Sequence[str] | None = None,
    compare_without_privacy: bool = False,
    comparison_learning_rate: float | None = None,
) -> DPTrainer:
    """Trains privately, saves, and shows what came of it; `results.json` in the output directory says the same.

    Args:
        model: the initial model.
        make: `make(kind, model=..., args=..., **others)` is a trainer of that kind, with optimizer and data.
        score: how well a trainer's model does.
        recipe: what limits a micro-batch of the private training, and what either training ends with.
        usage: Python that loads what is saved and uses it, with DIRECTORY for where.
        plain: makes of the trained model the one that is saved, if it is another: Transformers can load it by itself.
        groups: the group of each example that is scored, for a report by group.
        compare_without_privacy: train a copy of the initial model too, with the ordinary Trainer and the same
            arguments, optimizer and callbacks: as many steps of shuffled batches of the same size, with no clipping of
            examples (only max_grad_norm, which Trainer has by itself) and no noise. It is not saved: its weights are
            not private, and neither is what is said of them.
        comparison_learning_rate: of that training, if it is another one.
    """
    directory, checkpoint = Path(str(arguments.output_dir)), checkpoint_of(arguments)
    usage = in_four_bits(usage) if getattr(recipe, "load_in_4bit", False) else usage
    if recipe.average and arguments.load_best_model_at_end:
        raise ConfigurationError(
            f"--average {recipe.average} with --load_best_model_at_end.",
            why="training would end with the average, and not with the best model.",
            fix="use one of them.",
        )
    if plain is not None and arguments.push_to_hub and arguments.hub_strategy != "end":
        print("Pushed when it has ended: until then the model has a form that only this recipe knows.")
        arguments = replace(arguments, hub_strategy="end")
    initial = copy.deepcopy(model) if compare_without_privacy else None

    def made(kind: type[Trainer], **others: Any) -> Any:
        trainer = make(kind, **others)
        if recipe.average:
            trainer.add_callback(MovingAverage(recipe.average))
        return trainer

    tokens = recipe.max_tokens_per_micro_batch
    trainer = made(DPTrainer, model=model, args=arguments, privacy=privacy, max_tokens_per_micro_batch=tokens)
    untrained = _Untrained(lambda: score(trainer))
    if checkpoint is None and privacy.re_attention is None:
        trainer.add_callback(untrained)
    else:
        untrained.on_train_begin()  # later it would be another model
    trainer.train(resume_from_checkpoint=checkpoint)
    after, without = score(trainer), None
    columns = {"before": untrained.scores, f"epsilon {upper(trainer.privacy_report().epsilon, 3)}": after}
    if plain is not None:
        trainer.model = trainer.model_wrapped = plain(trainer.accelerator.unwrap_model(trainer.model))
    save(trainer, usage, changed=plain is not None, is_pushed=False)  # pushed when its card says how it is used
    if trainer.is_world_process_zero():
        write_results(columns, directory)  # a comparison may take as long again
    if arguments.push_to_hub:
        trainer.push_to_hub(commit_message="Model save")
    if initial is not None:
        aside = {"output_dir": str(directory / "without_privacy"), "save_strategy": "no", "push_to_hub": False}
        own = {} if comparison_learning_rate is None else {"learning_rate": comparison_learning_rate}
        ordinary = made(Trainer, model=initial, args=replace(arguments, **aside, **own))
        ordinary.train()
        without = score(ordinary)
    if trainer.is_world_process_zero():
        if without is not None:
            columns["without privacy"] = without
            write_results(columns, directory)
        _show(columns)
        if groups is not None:
            report_by_group(
                after.of_examples,
                groups,
                measure=after.measure,
                larger_is_better=after.larger_is_better,
                directory=directory,
                without_privacy=None if without is None else without.of_examples,
            )
        print(trainer.privacy_report())
    return trainer


def in_four_bits(usage: str) -> str:
    """`CONTINUE` for adapters whose base was in 4 bits when they were trained."""
    return usage.replace("import ", "import BitsAndBytesConfig, ", 1).replace("max_new_tokens=20)", _FOUR_BITS)


def save(trainer: DPTrainer, usage: str, *, changed: bool = False, is_pushed: bool = True) -> None:
    """Saves the model, and the log for `hf-dp report`, which never goes up. Prints how plain Transformers loads the
    model and uses it, and adds that to its card.

    Args:
        changed: the saved model has other names of parameters than the trained one.
        is_pushed: now, if at all.
    """
    trainer.save_model(_internal_call=not is_pushed)
    trainer.save_state()
    if trainer.is_world_process_zero():
        _say_how_to_use(Path(str(trainer.args.output_dir)), usage, trainer.privacy, changed)


def _say_how_to_use(directory: Path, usage: str, privacy: PrivacyConfig, changed: bool) -> None:
    lines = [_USAGE, "", "```python", usage.replace("DIRECTORY", repr("OWNER/NAME")), "```"]
    base = _local_base_model(directory)
    if base is not None:
        lines += [
            "",
            "These are adapters: they need their base model, which lay in a directory when they were trained.",
        ]
        print(f"The adapters in {directory} name their base model by its place on this machine, {base!r}.")
    if changed and privacy.re_attention is not None:
        lines += ["", "The attention's correction, which it was trained with, cannot be put back on this form."]
    path = directory / CARD_FILE
    text = path.read_text(encoding="utf-8").split(f"\n{_USAGE}\n")[0].rstrip()
    path.write_text("\n".join([text, "", *lines, ""]), encoding="utf-8")
    print(f"What is in {directory} loads without this recipe:\n\n{usage.replace('DIRECTORY', repr(str(directory)))}\n")


def _local_base_model(directory: Path) -> str | None:
    path = directory / "adapter_config.json"
    base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"] if path.exists() else None
    return base if base is not None and os.path.exists(base) else None


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


def write_results(columns: dict[str, Scores], directory: Path) -> None:
    """Each model's measures, as `results.json`."""
    kept = {name: scores.measures for name, scores in columns.items()}
    (directory / "results.json").write_text(json.dumps(kept, indent=2), encoding="utf-8")


def _show(columns: dict[str, Scores]) -> None:
    table = Table("", *columns, title="result")
    for name in next(iter(columns.values())).measures:
        table.add_row(name.replace("_", " "), *(f"{scores.measures[name]:.4f}" for scores in columns.values()))
    Console().print(table)
    said = {name: scores.said for name, scores in columns.items() if scores.said}
    for asked in next(iter(said.values()), ()):
        print(asked, *(f"    {name}: {texts[asked]}" for name, texts in said.items()), sep="\n")
