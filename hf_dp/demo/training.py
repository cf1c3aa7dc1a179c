"""Three trainings of one model: in public, ordinarily on private data, and privately on the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.progress import Progress, TaskID
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_dp.config import PrivacyConfig
from hf_dp.figures import upper
from hf_dp.training.trainer import DPTrainer


@dataclass(frozen=True)
class Schedule:
    """How one training runs.

    Attributes:
        epochs: passes over the data; in private training the expected number.
        learning_rate: at its peak; it falls linearly to 0.
        micro_batch: examples at once.
        accumulation: micro-batches to a step.
    """

    epochs: int
    learning_rate: float
    micro_batch: int
    accumulation: int = 1


@dataclass(frozen=True)
class TrainingSetup:
    """What all trainings share: tokenizer, evaluation data, a scratch folder, a seed and a place to show progress."""

    tokenizer: PreTrainedTokenizerBase
    evaluation: list[str]
    scratch: Path
    seed: int
    progress: Progress

    def ordinary(self, model: Any, texts: list[str], schedule: Schedule, title: str) -> Trainer:
        """Trains `model` in place without privacy."""
        return self._train(Trainer, model, texts, schedule, title)

    def untrained(self, model: Any) -> Trainer:
        """Evaluates `model` as it is."""
        return self._trainer(Trainer, model, [], Schedule(epochs=0, learning_rate=0.0, micro_batch=1))

    def private(
        self, model: Any, texts: list[str], schedule: Schedule, privacy: PrivacyConfig, title: str
    ) -> DPTrainer:
        """Trains `model` in place with DP-SGD."""
        trainer = self._train(DPTrainer, model, texts, schedule, title, privacy=privacy)
        assert isinstance(trainer, DPTrainer)
        return trainer

    def _train(
        self,
        make: Callable[..., Trainer],
        model: Any,
        texts: list[str],
        schedule: Schedule,
        title: str,
        **extra: Any,
    ) -> Trainer:
        trainer = self._trainer(make, model, texts, schedule, **extra)
        trainer.add_callback(_Bar(self.progress, title))
        trainer.train()
        return trainer

    def _trainer(
        self, make: Callable[..., Trainer], model: Any, texts: list[str], schedule: Schedule, **extra: Any
    ) -> Trainer:
        trainer = make(
            model=model,
            args=self._arguments(schedule),
            train_dataset=_dataset(self.tokenizer, texts) if texts else None,
            eval_dataset=_dataset(self.tokenizer, self.evaluation),
            processing_class=self.tokenizer,
            data_collator=DataCollatorForLanguageModeling(self.tokenizer, mlm=False),
            **extra,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _arguments(self, schedule: Schedule) -> TrainingArguments:
        return TrainingArguments(
            str(self.scratch),
            num_train_epochs=schedule.epochs,
            learning_rate=schedule.learning_rate,
            per_device_train_batch_size=schedule.micro_batch,
            gradient_accumulation_steps=schedule.accumulation,
            per_device_eval_batch_size=200,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=self.seed,
        )


def evaluation_loss(trainer: Trainer) -> float:
    """Mean loss of a token of the evaluation messages, in nats."""
    return float(trainer.evaluate()["eval_loss"])


def _dataset(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Dataset:
    return Dataset.from_dict({"input_ids": tokenizer([text + tokenizer.eos_token for text in texts])["input_ids"]})


class _Bar(TrainerCallback):
    def __init__(self, progress: Progress, title: str) -> None:
        self._progress, self._title = progress, title
        self._task: TaskID | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._task = self._progress.add_task(self._title, total=state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._task is not None and logs and "epsilon" in logs:
            self._progress.update(self._task, description=f"{self._title}, epsilon {upper(float(logs['epsilon']), 3)}")
