"""What a training says as it begins: what is promised, what is drawn, and, after some steps, how long it will take."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils.tqdm import tqdm
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.figures import percent, steps_in_words, upper
from hf_dp.planning.start import usual_rate
from hf_dp.step.plan import Plan
from hf_dp.step.written import plain_optimizer

logger = logging.getLogger(__name__)

_SECONDS = {"s": 1, "min": 60, "h": 3600, "days": 86400}
# Of the time of a training, at most one part in so many goes into saying what was spent.
_SELDOM = 50
# Adapters are one part in so many, or less.
_FEW = 10
# A rate of which the one that is proposed is more than so many times.
_LOW = 50
# Seconds of steps that tell how long others take.
_SEEN = 2.0


def say(message: str) -> None:
    """One line or more, by rank 0, above a progress bar if there is one; no result, so to the standard error.

    Whoever turns warnings of the logger `hf_dp` off is not told.
    """
    if ranks.rank() == 0 and logger.isEnabledFor(logging.WARNING):
        tqdm.write(message, file=sys.stderr)


def opening(plan: Plan, model: nn.Module | None = None, optimizer: Any = None) -> list[str]:
    """What is promised, what is drawn, and what is said of a learning rate that will hardly move anything."""
    config, unit = plan.config, plan.mechanism.unit.name
    what = f"the epsilon of noise multiplier {plan.noise_multiplier:g}, in the log and in privacy_report(),"
    if config.target_epsilon is not None:
        what = f"epsilon {config.target_epsilon:g}"
    elif config.target_tpr is not None:
        what = f"at most {percent(config.target_tpr)} found at {percent(config.at_fpr)} false positives,"
    never = "NOT PRIVATE (without noise, or with a seed that subtracts it)"
    said = f"{what} at delta {upper(plan.delta, 3)} for {unit}" if _is_private(plan) else never
    said += ", the earlier trainings included" if plan.mechanism.earlier and _is_private(plan) else ""
    whose = "each example's gradient"
    if config.unit is not None and config.unit_sampling == "units":
        whose = f"the mean gradient of the drawn examples with each value of {config.unit!r}"
    drawn = f"Drawn: {plan}. max_grad_norm is 0: {whose} is clipped."
    return [f"Private training: {said}.", drawn, *_of_rates(plan.steps, model, optimizer)]


def _of_rates(steps: int, model: nn.Module | None, optimizer: Any) -> Iterator[str]:
    optimizer = plain_optimizer(optimizer)
    groups = getattr(optimizer, "param_groups", [])
    rates = [group.get("initial_lr", group.get("lr")) for group in groups]
    if rates and all(rate == 0 for rate in rates):  # None is of an optimizer that finds its own
        yield "Learning rate: 0. Unless something raises it, no weight moves, and steps are paid for."
        return
    if rates and all(group.get("lr") == 0 for group in groups):
        yield (
            "Schedule: a rate of 0 in the step that comes first, which is paid for and moves no weight, as where a "
            "warm-up begins."
        )
    rate = max((float(rate or 0) for rate in rates), default=0.0)
    # What was measured is of adapters; a whole model may need far less.
    parameters = [] if model is None else list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    is_few = trained and trained * _FEW <= sum(p.numel() for p in parameters)
    usual = usual_rate(steps)
    if is_few and "adam" in type(optimizer).__name__.lower() and 0 < rate * _LOW < usual:
        yield (
            f"Learning rate: {rate:.2g} moves each weight by some {rate * math.sqrt(steps):.1g} in all, since Adam "
            f"divides by the noise, and private steps are few. hf-dp plan proposes {usual:.2g} for adapters in so many."
        )


def _is_private(plan: Plan) -> bool:
    return bool(plan.noise_multiplier) and not plan.mechanism.reproducible


class Clock:
    """Says how long a training will take by steps that were seen, once: rows of the check tell nothing of batches.

    What depends on how long private rows take is not said where such things are withheld.

    Args:
        plan: of the training.
        done: how many steps were taken before.
        charged: how many are in the ledger: more, where those of a lost checkpoint are, which a budget pays for once.
    """

    def __init__(self, plan: Plan, done: int, charged: int) -> None:
        self._ahead = int(min(plan.steps - done, plan.budgeted_steps - charged))
        self._is_silent = plan.config.withhold_non_private_logs
        self._seen, self._took, self._since = -1, 0.0, time.monotonic()

    def checked(self) -> None:
        """When the check before the first step is through, which began with this clock."""
        self._say(f"the check before the first step took {in_words(time.monotonic() - self._since)}")

    def begins(self) -> None:
        """Before each step: what lies between steps is not counted."""
        self._since = time.monotonic()

    def stepped(self) -> None:
        """After each step. The first one is not like the others: much is made in it."""
        self._ahead, self._seen = self._ahead - 1, self._seen + 1
        self._took += time.monotonic() - self._since if self._seen else 0.0
        if self._took >= _SEEN and self._ahead > 0:
            whole, took = in_words(self._ahead * self._took / self._seen), in_words(self._took)
            ahead, seen = steps_in_words(self._ahead), steps_in_words(self._seen)
            self._say(f"about {whole} for {ahead} ahead, as {seen} took {took}; what lies between steps is not counted")
            self._is_silent = True

    def _say(self, what: str) -> None:
        if not self._is_silent:
            say(f"Time: {what}.")


def in_words(seconds: float) -> str:
    """A duration to two digits, in the largest unit of which there are two."""
    name = next((name for name in reversed(_SECONDS) if seconds >= 2 * _SECONDS[name]), "s")
    return f"{float(f'{seconds / _SECONDS[name]:.2g}'):g} {name}"


class Seldom:
    """Lets through what takes time to compute as seldom as that it takes little of a training's time."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, compute: Callable[[], None]) -> None:
        """Calls `compute`, or not."""
        if (began := time.monotonic()) >= self._next:
            compute()
            self._next = time.monotonic() + _SELDOM * (time.monotonic() - began)


@contextmanager
def passes_shown(model: nn.Module, *, is_silent: bool) -> Iterator[None]:
    """Inside, a line counts the forward passes of `model`, by rank 0, where there is a terminal; then it goes."""
    # None: only where there is a terminal.
    hidden = True if is_silent or ranks.rank() else None
    shown = tqdm(desc="Checking before the first step", unit=" passes", leave=False, disable=hidden)  # type: ignore[no-untyped-call]
    with shown as line:

        def count(*_: Any) -> None:
            line.update()

        handle = model.register_forward_pre_hook(count)
        try:
            yield
        finally:
            handle.remove()
