"""The story: one public past, two fine-tunings, what each gives away."""

from __future__ import annotations

import copy
import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from hf_dp.audit.guessed import Guesses, exposures
from hf_dp.audit.texts import completions, written
from hf_dp.config import PrivacyConfig
from hf_dp.demo.figure import draw
from hf_dp.demo.messages import CANDIDATES, Messages, generate
from hf_dp.demo.model import adapted, new_model, train_tokenizer
from hf_dp.demo.quiet import one_thread, quiet
from hf_dp.demo.result import Result, Row
from hf_dp.demo.training import Schedule, TrainingSetup, evaluation_loss
from hf_dp.errors import ConfigurationError

FIGURE_FILE = "demo.png"
# How many secrets are asked for in the figure.
_SHOWN = 3


@dataclass(frozen=True)
class Scratch:
    """A model that is made for the demo, and how it is pretrained on public messages."""

    public: int
    width: int
    layers: int
    pretraining: Schedule


@dataclass(frozen=True)
class Scale:
    """How large the demo is. What it tells apart is tuned for these numbers."""

    private: int
    evaluation: int
    canaries: int
    ordinary_training: Schedule
    private_training: Schedule
    scratch: Scratch | None = None
    clipping_norm: float = 1.0


FULL = Scale(
    scratch=Scratch(4000, 64, 2, Schedule(epochs=2, learning_rate=1e-3, micro_batch=16)),
    private=3000,
    evaluation=400,
    canaries=16,
    ordinary_training=Schedule(epochs=30, learning_rate=8e-3, micro_batch=16),
    private_training=Schedule(epochs=30, learning_rate=3e-3, micro_batch=64, accumulation=16),
)
QUICK = Scale(
    scratch=Scratch(1000, 64, 2, Schedule(epochs=3, learning_rate=2e-3, micro_batch=16)),
    private=600,
    evaluation=100,
    canaries=8,
    ordinary_training=Schedule(epochs=30, learning_rate=8e-3, micro_batch=16),
    private_training=Schedule(epochs=8, learning_rate=3e-3, micro_batch=64, accumulation=3),
)
PRETRAINED = Scale(
    private=300,
    evaluation=60,
    canaries=8,
    ordinary_training=Schedule(epochs=10, learning_rate=2e-3, micro_batch=10),
    private_training=Schedule(epochs=10, learning_rate=2e-3, micro_batch=25, accumulation=4),
)


def run(output_dir: Path, scale: Scale, data_seed: int, console: Console, model: Path | None = None) -> Result:
    """Trains, measures, prints the table, and writes the private model and the figure.

    Args:
        output_dir: for the private model with its tokenizer and report, and for the figure.
        scale: how large.
        model: the folder of a pretrained model, where the scale makes none from scratch.
        data_seed: of messages, secrets, initial weights and the order of ordinary training. The private run's
            sampling and noise do not depend on it: they come from the operating system.
        console: where to print.

    Returns:
        What was measured.

    Raises:
        ConfigurationError: `output_dir` cannot be written to, or `model` not be read.
    """
    assert (model is None) == (scale.scratch is not None)
    # Before minutes of training, not after.
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output_dir).close()
    except OSError as error:
        raise ConfigurationError(
            f"--output-dir {str(output_dir)!r}: {error}.",
            why="the private model and its record would have no place.",
            fix="give a folder that can be made or written to, such as hf-dp-demo.",
        ) from error
    with quiet():
        made = None if model is None else adapted(model)
    known = "A small GPT-2 that knows public messages only" if model is None else f"The language model in {model}"
    console.print(
        f"{scale.canaries} secret card codes, each in one of {scale.private:,} private messages. {known} "
        f"is fine-tuned on them twice{', with LoRA' * (model is not None)}: ordinarily, and with differential privacy."
    )
    threads = one_thread() if model is None else nullcontext()
    with quiet(begins=True), threads, tempfile.TemporaryDirectory() as scratch, _progress(console) as progress:
        result = _train_and_measure(output_dir, scale, data_seed, Path(scratch), progress, made)
        draw(result, output_dir / FIGURE_FILE)
    console.print(result.table())
    console.print(f"Private model, its report and the figure ({FIGURE_FILE}) are in {output_dir}", soft_wrap=True)
    console.print(
        f"Load it: transformers.AutoModelForCausalLM.from_pretrained({str(output_dir)!r})", soft_wrap=True, markup=False
    )
    shortcomings = result.shortcomings()
    if shortcomings:
        console.print("\n[bold]This run did not show what the demo is for.[/bold] Not shown:")
    for shortcoming in shortcomings:
        console.print(f"  - {shortcoming}")
    return result


def _train_and_measure(
    output_dir: Path, scale: Scale, data_seed: int, aside: Path, progress: Progress, made: tuple[Any, Any] | None
) -> Result:
    scratch = scale.scratch
    messages = generate(
        public=0 if scratch is None else scratch.public,
        private=scale.private,
        evaluation=scale.evaluation,
        canaries=scale.canaries,
        seed=data_seed,
    )
    transformers.set_seed(data_seed)
    if made is not None:
        public, tokenizer = made
        setup = TrainingSetup(tokenizer, messages.evaluation, aside, data_seed, progress)
        trainer = setup.untrained(public)
    else:
        assert scratch is not None
        tokenizer = train_tokenizer(messages.public)
        public = new_model(tokenizer, width=scratch.width, layers=scratch.layers)
        setup = TrainingSetup(tokenizer, messages.evaluation, aside, data_seed, progress)
        trainer = setup.ordinary(public, messages.public, scratch.pretraining, "Pretraining on public messages")
    attack = Attack(messages, tokenizer)
    before = attack.row("before", 0.0, 0.0, evaluation_loss(trainer), public)

    ordinary, private = copy.deepcopy(public), copy.deepcopy(public)
    trainer = setup.ordinary(ordinary, messages.private, scale.ordinary_training, "Fine-tuning, ordinary")
    ordinary_row = attack.row("ordinary", math.inf, None, evaluation_loss(trainer), ordinary)

    privacy = PrivacyConfig(target_epsilon=8.0, clipping_norm=scale.clipping_norm, equal_widths=scratch is None)
    private_trainer = setup.private(private, messages.private, scale.private_training, privacy, "Fine-tuning, private")
    report = private_trainer.privacy_report()
    private_row = attack.row("private", report.epsilon, report.delta, evaluation_loss(private_trainer), private)
    private_trainer.save_model(str(output_dir))
    return Result(before, ordinary_row, private_row, tuple(messages.planted[:_SHOWN]))


class Attack:
    """What is done to each model: its secrets, those of `messages`, and what they could have been are the same."""

    def __init__(self, messages: Messages, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._secrets = tokenizer, messages.planted
        self._planted, self._unplanted = (
            [Guesses.of(tokenizer, one, CANDIDATES) for one in secrets]
            for secrets in (messages.planted, messages.unplanted)
        )

    def row(self, name: str, epsilon: float, delta: float | None, loss: float, model: Any) -> Row:
        """What it finds of one model."""
        said = completions(model, self._tokenizer, self._secrets, self._tokenizer.model_max_length)
        words = written(model, self._tokenizer, self._secrets[:_SHOWN])
        return Row(
            name=name, epsilon=epsilon, delta=delta, evaluation_loss=loss, planted=exposures(model, self._planted),
            unplanted=exposures(model, self._unplanted), extracted=sum(one.greedy for one in said),
            said=tuple(words),
        )  # fmt: skip


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeElapsedColumn(), console=console)
