"""Batches that fit few examples, or are refused, and rates with which noise carries no weight too far in many steps."""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import TrainingArguments

from hf_dp import PrivacyConfig, accounting
from hf_dp.config.units import drawn_are
from hf_dp.sampling.sampler import check_sizes


def check_batch(arguments: TrainingArguments, privacy: PrivacyConfig, n: int) -> None:
    """Refuses a batch of more than all `n` rows as the trainer would, and before a model is loaded for it.

    Raises:
        ConfigurationError: with both numbers.
    """
    check_sizes(n, _batch(arguments), is_secret=privacy.hides_n, of=drawn_are(privacy))


def _batch(arguments: TrainingArguments) -> int:
    return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size


def planned_steps(arguments: TrainingArguments, n: int) -> int:
    """How many a training on `n` examples will take."""
    steps = arguments.max_steps
    if steps <= 0:
        steps = math.ceil(arguments.num_train_epochs * math.ceil(n / _batch(arguments)))
    accounting.check_steps(steps)
    return steps


def in_many_steps(rate: float, steps: int, measured: int) -> float:
    """Adam's rate that was measured in so many steps, for `steps` of them.

    Adam moves a weight that has no signal by about the rate in each step, at random, however little noise there is: in
    T steps by the rate times sqrt(T). Of more steps than were measured it is divided by sqrt(steps / measured).
    """
    return rate * min(1.0, math.sqrt(measured / steps))


def within(arguments: TrainingArguments, privacy: PrivacyConfig, n: int) -> TrainingArguments:
    """The same with an expected batch of at most all `n` examples, or units, where n is public."""
    rows, world = arguments.per_device_train_batch_size, arguments.world_size
    if privacy.hides_n or _batch(arguments) <= n:
        return arguments
    times = math.ceil(n / (rows * world))
    rows = max(1, n // (times * world))
    print(f"A batch of {times * rows * world} of {n} that are drawn from: {times} x {rows} on each device.")
    return replace(arguments, per_device_train_batch_size=rows, gradient_accumulation_steps=times)
