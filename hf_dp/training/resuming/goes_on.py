"""Which ledger the next training goes on with, and with which it would leave out something."""

from __future__ import annotations

import logging
from typing import Any

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.accounting.earlier import is_of_earlier, releases_of
from hf_dp.config.target import told
from hf_dp.errors import BudgetExceededError, LedgerError
from hf_dp.figures import upper
from hf_dp.step.plan import Plan
from hf_dp.training.resuming.output_lock import warn_of_later
from hf_dp.training.resuming.resume import SavedRun, examples_of, labels_of
from hf_dp.training.resuming.same_rows import (
    note_rows,
    warn_of_another_branch,
    warn_of_others_on,
    warn_of_what_went_on,
)

logger = logging.getLogger(__name__)

# Of a ledger's promise: whose data was trained on. One epsilon is about units of one kind.
_OF_UNITS = ("dataset_size", "unit", "max_examples_per_unit", "unit_sampling", "drawn_from")


# What one report says of all that is in its ledger.
_SAID_OF_ALL = {
    "reproducible": "a seed that is known, or none: who knows it can draw the noise of those steps again",
    "noise": "another noise",
    "noise_multiplier": "another noise multiplier",
    "equal_widths": "another equal_widths",
}


def continued(ledger: Ledger, saved: SavedRun | None, plan: Plan, dataset: Any, before: Plan | None = None) -> Ledger:
    """The ledger that the next training goes on with.

    Args:
        ledger: of this process so far.
        saved: of the checkpoint whose weights were read, whatever step it says; None if there was none.
        plan: of the next training.
        dataset: its training data.
        before: of the training before in this process, whose steps are in `ledger`.

    Raises:
        LedgerError: `saved` is of another promise or other data, or an earlier training in this process is, or what one
            that took no step has released; or neither ledger has all steps of the other.
        BudgetExceededError: the budget was already spent.
    """
    _refuse_told(ledger, saved, plan, before)
    warn_of_what_went_on(plan)
    if saved is not None:
        if (doubt := saved.check(plan.promise, dataset)) is not None:
            ranks.warn(logger, doubt)
        _refuse_other_releases(saved.ledger, plan)
        _refuse_another_branch(ledger, saved)
        if ledger.charges:
            ledger.check_same_promise(plan.promise)  # which of the two goes on is told by numbers of steps alone
        # In one process more may have been spent since the checkpoint than it knows.
        found = max(ledger, saved.ledger, key=lambda one: (one.steps, one.charges))
        if saved.seal is not None:
            found.sealed.add(saved.seal)  # where this process begins
        if saved.checkpoint is not None and not warn_of_later(saved.checkpoint, found):
            warn_of_another_branch(plan, found, saved.checkpoint.name, saved.seal)
        warn_of_others_on(plan, dataset, found, saved.seal)
        note_rows(dataset, found)
        return found
    _refuse_made_otherwise(ledger, plan)
    warn_of_others_on(plan, dataset, ledger)
    note_rows(dataset, ledger)
    if not ledger.steps:
        _refuse_strangers(ledger, plan)
        return ledger
    if plan.config.noise_multiplier is None:
        fix = "plan the whole training at once, or use noise_multiplier, where the ledger adds up what is spent."
        if ledger.steps < plan.mechanism.steps:
            fix = (
                "train(resume_from_checkpoint=True) goes on from a checkpoint; save_model() keeps what there is. "
                "Without a checkpoint, and where nothing of this training is kept or was shown, make a new trainer "
                "with the model loaded anew."
            )
        raise BudgetExceededError(
            f"train() was called again after {ledger.steps} private steps.",
            why=f"the noise is calibrated for one training to spend {told(plan.config)}.",
            fix=fix,
        )
    made, now = ledger.promise, plan.promise
    if any(made.get(name) != now.get(name) for name in (*_OF_UNITS, "delta")):
        raise LedgerError(
            f"train() was called again with {examples_of(now)} and delta {upper(now['delta'], 3)}, after "
            f"{ledger.steps} private steps on {examples_of(made)} with delta {upper(made['delta'], 3)}.",
            why="one epsilon for both would be stated at a delta that is too large for one of them.",
            fix="use a new trainer, whose ledger is its own, and load the model anew; or the same data and delta.",
        )
    return ledger


def _refuse_told(ledger: Ledger, saved: SavedRun | None, plan: Plan, before: Plan | None) -> None:
    configs = [None if saved is None else saved.config, None if before is None else before.config]
    told_losses = any(config is not None and not config.withhold_non_private_logs for config in configs)
    spent = ledger if saved is None else saved.ledger
    if told_losses and plan.config.withhold_non_private_logs and (spent.steps or labels_of(spent)):
        raise LedgerError(
            f"withhold_non_private_logs=True after {spent.steps} private steps whose losses were logged.",
            why="they are exact functions of the private data, and the report and the card would say that there are "
            "none.",
            fix="go on with withhold_non_private_logs=False, as it was begun, or begin anew with a new trainer and a "
            "new model object.",
        )


def _refuse_another_branch(ledger: Ledger, saved: SavedRun) -> None:
    """Of two that go on from the same steps, neither has those that the other made since."""
    begun_at = ledger.steps - ledger.own_steps
    # Rank 0 writes, and knows what it wrote.
    is_own = saved.seal in ledger.sealed or ranks.rank() != 0
    released = sorted(label for label in ledger.own_labels if not is_of_earlier(label))
    if (ledger.own_steps or released) and not is_own:
        made = f"made {ledger.own_steps} private steps after the first {begun_at}"
        made = made if ledger.own_steps else f"released {', '.join(released)}, and made no step"
        raise LedgerError(
            f"this trainer has {made}, and the checkpoint is of {saved.ledger.steps} steps that another process made, "
            "or another trainer.",
            why="neither ledger has all that is in the other, so epsilon would leave out some of it.",
            fix="go on from a checkpoint that this trainer wrote or began with; or from that one in a new process, if "
            "nothing that this one made is kept or was seen.",
        )


def _refuse_made_otherwise(ledger: Ledger, plan: Plan) -> None:
    """Where `plan` is not held to the whole promise of the steps before."""
    before, now = ledger.promise, plan.promise
    differing = [words for name, words in _SAID_OF_ALL.items() if before.get(name) != now.get(name)]
    if differing and (ledger.steps or labels_of(ledger)):
        raise LedgerError(
            f"train() was called again with {' and '.join(differing)}.",
            why="one report and one card are about all that is in the ledger, and would be untrue of what was made "
            "before.",
            fix="train with the PrivacyConfig of before, or use a new trainer, whose ledger is its own, and load the "
            "model anew.",
        )


def _refuse_strangers(ledger: Ledger, plan: Plan) -> None:
    """Of a training that took no step, nothing but what this plan has set budget aside for."""
    known = [(release.label, release.event) for release in (*plan.releases, *releases_of(plan.mechanism.earlier))]
    strangers = sorted(made.label for made in ledger.releases if (made.label, made.event) not in known)
    others = [name for name in _OF_UNITS if ledger.promise.get(name) != plan.promise.get(name)]
    if strangers or (ledger.entries and others):
        labels = ", ".join(strangers or sorted({label for _, _, label in ledger.entries}))
        raise LedgerError(
            f"an earlier training that took no step has released {labels}, under another budget or of other data.",
            why="what that cost stays spent, and the noise of this training would be calibrated without it.",
            fix="train with the PrivacyConfig and the data of before, or with a new trainer, whose ledger is its own.",
        )


def _refuse_other_releases(ledger: Ledger, plan: Plan) -> None:
    """Of a training that took steps, each release that the plan sets budget aside for, with the noise of the plan."""
    for planned in plan.releases:
        made = sum(one.times for one in ledger.releases if (one.label, one.event) == (planned.label, planned.event))
        if made < planned.due(ledger.steps):
            raise LedgerError(
                f"the checkpoint's ledger has {ledger.steps} steps, and before them {made or 'no'} release of "
                f"{planned.label} ({planned.event}).",
                why=f"the plan has {planned.due(ledger.steps)} by then, and what it cost would not be charged.",
                fix="use a checkpoint whose trainer_state.json is as it was saved.",
            )
