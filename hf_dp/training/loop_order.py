"""In which order a loop of one's own does what belongs to a step: drawn, stepped, taken by the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from accelerate import skip_first_batches
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.agreement import rate_of
from hf_dp.data.loader import PoissonDataLoader
from hf_dp.errors import ConfigurationError
from hf_dp.step.written import Around, Weights
from hf_dp.training.generators import put_back

logger = logging.getLogger(__name__)


class LogicalBatch:
    """One Poisson draw of `PrivateRun.batches`, to be given to `PrivateRun.step` once."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self._item = item

    def _refused(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigurationError(
            "a batch of batches() is no input of a model.",
            why="it is a whole draw, which step() puts through the model a few rows at a time, to clip each by itself.",
            fix="call run.step(batch), which computes the loss and writes the gradients; rows to evaluate "
            "are collated apart.",
        )

    keys = items = values = get = to = __getitem__ = __iter__ = _refused


class MeanLoss(float):
    """What `PrivateRun.step` returns: a number, of a backward pass that was made."""

    def __truediv__(self, number: float) -> MeanLoss:  # as accelerate's backward() begins
        return MeanLoss(float(self) / number)

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused (`ConfigurationError`)."""
        raise ConfigurationError(
            "backward() of what step() returned.",
            why="it is the mean loss, a number for the log: step() has made the backward pass, clipped, added noise "
            "and written the gradients.",
            fix="leave it out: run.step(batch), then optimizer.step().",
        )


def refuse_as_loop(run: Any) -> NoReturn:
    """Refuses to go through a run itself (`ConfigurationError`)."""
    raise ConfigurationError(
        "a PrivateRun as what is looped over.",
        why="it is the whole training; its batches are drawn once it has begun.",
        fix="call run.begin(optimizer), and write `for batch in run.batches()`.",
    )


class DrawOrder:
    """Which draws a Trainer's loop has used: each is for one step, and none comes back."""

    def __init__(self) -> None:
        self._last = -1

    def used(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        """An item of the loader, for its step.

        Raises:
            ConfigurationError: it is none, or its draw was for another step, or for one before.
        """
        step = item.get("step")
        if not isinstance(step, int) or step <= self._last:
            raise ConfigurationError(
                "a step with a logical batch of another step."
                if isinstance(step, int)
                else "a step with what is no logical batch of the training loader.",
                why="epsilon holds for batches that are drawn anew, by Poisson sampling, for each step.",
                fix="let each item of get_train_dataloader() come to training_step once, in the loader's order.",
            )
        self._last = step
        return item


def same_model(found: nn.Module, checked: nn.Module) -> nn.Module:
    """The model of a step.

    Raises:
        ConfigurationError: it is not the one that was checked.
    """
    if found is not checked:
        raise ConfigurationError(
            f"training_step with a {type(found).__name__} that is not the trainer's model.",
            why="what was checked before the first step, and what its gradients are of, is trainer.model.",
            fix="wrap it before the trainer is made, or leave _wrap_model and the loop as they are.",
        )
    return checked


class LoopOrder:
    """What was done last, and so what may come next. Every method refuses what does not (`ConfigurationError`).

    Args:
        model: whose weights the optimizer alone may move.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = Weights(model)
        self._drawn: LogicalBatch | None = None
        self._has_begun, self._has_ended, self._is_untaken = False, False, False
        self._is_half = False
        self._loop = self._idle = 0

    @property
    def has_ended(self) -> bool:
        """Whether no step will follow."""
        return self._has_ended

    def begin(self) -> None:
        """The weights are those to begin with."""
        self._has_begun = True
        self._weights.note()

    def refuse_second_beginning(self) -> None:
        """Before a run begins."""
        if self._has_begun:
            raise ConfigurationError(
                "begin() of a run that has begun.",
                why="one PrivateRun is one training, with one optimizer and one ledger.",
                fix="go on with run.batches(), or make another PrivateRun of a model that is loaded anew.",
            )

    def new_loop(self) -> int:
        """A loop over batches begins, in place of the one before; its number."""
        self._refuse_without_beginning("batches()")
        self._loop += 1
        return self._loop

    def draw(self, item: Mapping[str, Any]) -> LogicalBatch:
        """The next batch."""
        self._drawn = LogicalBatch(item)
        return self._drawn

    def refuse_unused(self, loop: int) -> None:
        """Before the next batch of a loop."""
        self._refuse_half("the next batch")
        if loop != self._loop or self._drawn is not None:
            raise ConfigurationError(
                "a batch of batches() without its step()"
                + ", since another loop has begun" * (loop != self._loop)
                + ".",
                why="each drawn batch, an empty one too, is a step: choosing among them by what is in them is nothing "
                "that epsilon accounts for.",
                fix="call step(batch) for every batch, in one loop over run.batches() at a time.",
            )
        self._refuse_untaken("the next batch")

    @contextmanager
    def used(self, batch: LogicalBatch, ledger: Ledger, optimizer: Any) -> Iterator[Mapping[str, Any]]:
        """What is in a batch, for its step. One that fails before it is in the ledger can be taken again, by a single
        process.
        """
        self._refuse_without_beginning("step()")
        self._refuse_half("step()")
        if batch is not self._drawn or self._has_ended:
            raise ConfigurationError(
                "step() with what is not the latest batch of batches(), or was used before.",
                why="epsilon holds for batches that are drawn anew, by Poisson sampling, for each step.",
                fix="call step(batch) once for each batch, inside `for batch in run.batches()`.",
            )
        self.refuse_unsteady("step()")
        if isinstance(optimizer, AcceleratedOptimizer) and not optimizer.gradient_state.sync_gradients:
            raise ConfigurationError(
                "step() within accumulate() of accelerate, in a round in which its optimizer does nothing.",
                why="the gradient would be paid for, and not be taken.",
                fix="leave accumulate() and gradient_accumulation_steps out: expected_batch_size is all of a step, and "
                "micro_batch_size what is in memory at a time.",
            )
        self._warn_of_no_rate(optimizer)
        # Before the step, so that neither another thread nor a loop that goes on after an error can use it again.
        self._drawn, self._is_half, spent = None, True, ledger.steps
        try:
            yield batch._item
        except BaseException:
            # The other ranks are somewhere in their step, and what they wait for is not how this one would begin again.
            if ledger.steps == spent and ranks.world_size() == 1:
                self._drawn, self._is_half = batch, False
            raise
        self._is_untaken, self._is_half = True, False

    def taken(self) -> None:
        """The optimizer has moved the weights by it."""
        self._is_untaken = False
        self._weights.note()

    def around(self, taken: Callable[[], None]) -> Around:
        """What the optimizer tells of its step, which ends with `taken`."""
        return Around(self._refuse_moved, taken, self._dropped)

    def _refuse_moved(self) -> None:
        self._weights.refuse_moved("step() of the optimizer")

    def _dropped(self) -> None:
        self._is_untaken = False

    def end(self) -> None:
        """No step will follow."""
        self._has_ended, self._drawn = True, None

    def refuse_unsteady(self, what: str) -> None:
        """Before weights are used: they must be those of the steps that the ledger counts."""
        self._refuse_without_beginning(what)
        self._refuse_untaken(what)
        self._weights.refuse_moved(what)

    def _warn_of_no_rate(self, optimizer: Any) -> None:
        # A warm-up begins with 0, and stays there for a loop that does not step its scheduler.
        self._idle += not rate_of(optimizer)
        if self._idle == 2:
            ranks.warn(
                logger,
                "The optimizer's learning rate is 0 in a second step: that is paid for, and no weight moves. Does "
                "the loop call step() of its scheduler, after the optimizer's?",
            )

    def _refuse_half(self, what: str) -> None:
        if self._is_half:
            raise ConfigurationError(
                f"{what} after a step that was paid for, or that several processes took together, and did not come to "
                "its end, or while another is at work.",
                why="each draw is for one release, and of this one a part may have been seen.",
                fix="call save_checkpoint(), which has what was spent, and go on from there with another PrivateRun; "
                "of several processes, where one has failed, end all and resume from the last checkpoint.",
            )

    def _refuse_untaken(self, what: str) -> None:
        if self._is_untaken:
            raise ConfigurationError(
                f"{what} before the run's optimizer has taken the gradient of the latest step.",
                why="it is paid for, and the weights would be without it, or be moved by an optimizer that is not "
                "known here.",
                fix="call step() of the optimizer that begin() was given, right after step(batch) of the run.",
            )

    def _refuse_without_beginning(self, what: str) -> None:
        if not self._has_begun:
            raise ConfigurationError(
                f"{what} of a run that has not begun.",
                why="nothing was checked yet, and nothing is known of these weights.",
                fix="call run.begin(optimizer) first, and go no further where it raises.",
            )


def items_of_epoch(loader: PoissonDataLoader, step: int, generators: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rest of the epoch in which `step` lies, as the run without a break would have read it.

    Args:
        generators: the states of a checkpoint that is gone on from, which are put back once.
    """

    def put_back_once() -> None:
        if generators:
            put_back(generators)
        generators.clear()

    epoch, done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    if not done:
        put_back_once()
    # Its making draws a number from the global generator: in the middle of an epoch that was before the checkpoint.
    items = iter(skip_first_batches(loader, done) if done else loader)
    put_back_once()
    yield from items
