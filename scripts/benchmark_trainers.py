"""A step of DPTrainer beside a step of Trainer, as whoever changes two lines meets both.

    python scripts/benchmark_trainers.py --case "llama 135M lora" --processor

All that is between two steps is part of them: data, logging, gradients clipped by Trainer, draws, noise and the ledger.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from measuring import Dtype, Processor, clock_of, median_of, ratio_of, setting_of
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator
from workloads import CASES, MICRO_BATCHES, SMALL_CASES, Case, Setting, batches, build

from hf_dp import DPTrainer, PrivacyConfig


@dataclasses.dataclass
class _Turns:
    """Which of two threads runs: 0, 1, or None once one of them has ended."""

    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    whose: int | None = 0

    def give(self, to: int | None) -> None:
        with self.changed:
            self.whose = None if self.whose is None else to
            self.changed.notify_all()

    def wait(self, own: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.whose in (own, None))


class _InTurns(TrainerCallback):
    """Lets another training make a step after each of this one, and notes the seconds from step to step."""

    def __init__(self, number: int, turns: _Turns, clock: Callable[[], float]) -> None:
        self.number, self.turns, self.clock = number, turns, clock
        self.seconds: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(self.clock() - self.begun)
        self.turns.give(1 - self.number)
        self.turns.wait(self.number)
        control.should_training_stop |= self.turns.whose is None
        self.begun = self.clock()


class _Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, case: Case, device: torch.device) -> None:
        self.rows = [
            {name: values[row].cpu() for name, values in batch.items()}
            for batch in batches(case, device)
            for row in range(case.batch)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def main(
    case: Annotated[str, typer.Option(help="What is measured.")] = "llama 135M lora",
    repeats: Annotated[int, typer.Option(help="Timed steps of each.")] = 7,
    dtype: Dtype = "float32",
    processor: Processor = False,
) -> None:
    """A step of DPTrainer, as a ratio to one of Trainer with the same arguments, whose steps take turns."""
    setting = setting_of(dtype, "sdpa")
    seconds = in_trainers(SMALL_CASES.get(case) or CASES[case], repeats, setting, clock_of(processor))
    print(f"{case}: a step of Trainer takes {median_of(seconds[0]):.3f} s, one of DPTrainer "
          f"{ratio_of(seconds[1], seconds[0]):.2f} of it")  # fmt: skip


def in_trainers(case: Case, repeats: int, setting: Setting, clock: Callable[[], float]) -> list[list[float]]:
    """Seconds of `repeats` steps of Trainer and of DPTrainer. All rows are in each step: as many for both."""
    data, turns = _Rows(case, setting.device), _Turns()
    callbacks = [_InTurns(number, turns, clock) for number in (0, 1)]

    def train(number: int, folder: str) -> None:
        arguments = TrainingArguments(
            folder,
            max_steps=repeats + 3,
            per_device_train_batch_size=case.batch,
            gradient_accumulation_steps=MICRO_BATCHES,
            bf16=case.autocast,
            use_cpu=setting.device.type == "cpu",
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        shared = {"train_dataset": data, "data_collator": default_data_collator, "callbacks": [callbacks[number]]}
        model = build(case, setting)
        promise: Any = {"privacy": PrivacyConfig(noise_multiplier=1.0)} if number else {}
        (DPTrainer if number else Trainer)(model, arguments, **shared, **promise).train()

    def in_turn(number: int, folder: str) -> None:
        try:
            train(number, folder)
        finally:
            turns.give(None)

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=in_turn, args=(number, f"{folder}/{number}")) for number in (0, 1)]
        threads[0].start()
        turns.wait(1)
        threads[1].start()
        for thread in threads:
            thread.join()
    return [callback.seconds[2 : repeats + 2] for callback in callbacks]


if __name__ == "__main__":
    typer.run(main)
