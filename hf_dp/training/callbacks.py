"""What happens between steps: the ledger in every checkpoint, epsilon in the progress bar, the budget's end."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.agreement import keep_step, rate_of
from hf_dp.training.progress import Seldom

logger = logging.getLogger(__name__)


class PrivateTrainer(Protocol):
    """What the callback needs of the trainer that it is bound to."""

    callback_handler: Any

    @property
    def ledger(self) -> Ledger: ...

    def begin_private_run(self, state: TrainerState) -> None: ...

    def checkpoint_record(self) -> dict[str, Any]: ...

    def budget_is_left(self) -> bool: ...

    def spent(self) -> str: ...

    def after_optimizer_step(self) -> None: ...


class PrivacyCallback(TrainerCallback, ExportableState):
    """Bound to one DPTrainer, which adds it itself."""

    def __init__(self, trainer: PrivateTrainer | None = None) -> None:
        self.trainer = trainer
        self._seldom = Seldom()
        # Of the latest step: what a callback sets may be undone by the schedule before the next one.
        self._rate = 0.0

    def state(self) -> dict[str, Any]:
        """The ledger as of the saved step; it lands in `trainer_state.json`, in the same write as the step count."""
        ledger = None if self.trainer is None else self.trainer.checkpoint_record()
        return {"args": {}, "attributes": {"saved_ledger": ledger}}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer is not None:
            self.trainer.begin_private_run(state)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer is not None:
            keep_step(state.global_step, "goes on", self._rate)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Before what may follow: an evaluation or a checkpoint, in which ranks would wait for those that go on.
        if self.trainer is not None:
            keep_step(state.global_step, "stops" if control.should_training_stop else "ends an epoch", self._rate)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer is not None:
            keep_step(state.global_step, "stops", self._rate)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer is not None:
            self._rate = rate_of(kwargs["optimizer"])
            self.trainer.after_optimizer_step()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer is None:
            return
        self._seldom(self._show_spent)
        if self.trainer.budget_is_left():
            return
        if not control.should_training_stop and state.global_step < state.max_steps:
            ranks.warn(
                logger, "Training stops: the privacy budget is spent. Another step would exceed the target epsilon."
            )
        control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if logs and "epsilon" in logs:  # at the end of a training too
            self._show_spent()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._show_spent()

    def on_interruption(self, error: BaseException) -> None:
        """Of a training that ends by an exception: what it spent since the bar was written, perhaps in half a step; and
        that what was paid for is not lost."""
        # Where a checkpoint is refused, the step is that of the checkpoint, and its ledger is not this training's.
        if self.trainer is not None and (steps := self.trainer.ledger.steps):
            self._show_spent()
            error.add_note(
                f"Private steps that were paid for before this: {steps}. The model in memory has them, but perhaps the "
                "last, and trainer.save_model(DIRECTORY) saves it with what they cost."
            )

    def _show_spent(self) -> None:
        """On Trainer's bar, which rank 0 alone has. The words name their step: the bar goes on without them."""
        trainer = self.trainer
        for callback in () if trainer is None else trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None and trainer is not None:
                bar.set_postfix(epsilon=trainer.spent())
