"""Which private trainings of this process drew from the same rows: whoever is in one is in the others."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.data.repeated import are_in_both
from hf_dp.errors import LedgerError
from hf_dp.step.plan import Plan

logger = logging.getLogger(__name__)

_DRAWN: list[tuple[Callable[[Any], bool], Ledger]] = []


def note_rows(dataset: Any, ledger: Ledger) -> None:
    """A training of this ledger draws from `dataset`. Of a list that is not known later."""
    if not drew_from(dataset, ledger):
        _DRAWN.append((_told(dataset), ledger))


def drew_from(dataset: Any, ledger: Ledger) -> bool:
    """Whether the training of a ledger of this process did."""
    return any(own is ledger and is_told(dataset) for is_told, own in _DRAWN)


def others_on(dataset: Any, ledger: Ledger) -> list[Ledger]:
    """Of trainings that drew from it and took steps, but for that of `ledger`."""
    return [own for is_told, own in _DRAWN if own is not ledger and own.own_steps and is_told(dataset)]


def is_on_others(plan: Plan, dataset: Any, ledger: Ledger) -> bool:
    """Whether the promise says of a training of this process that nobody in its data is in this one's.

    Raises:
        LedgerError: it drew from rows of this data.
    """
    if plan.config.other_people and drew_from(dataset, ledger):
        raise LedgerError(
            "other_people=True, for weights that another private training in this process left, on rows of this data.",
            why="whoever is in these rows is in both, and epsilon would be without what that one cost them.",
            fix="let that one save (save_model(), or save() of a PrivateRun), and give PrivacyConfig(after=...) with "
            "that folder: both then share one budget. Or begin from weights of before.",
        )
    return plan.config.other_people


def warn_of_others_on(plan: Plan, dataset: Any, ledger: Ledger) -> None:
    """Says once in a process that several of its trainings drew from the same rows, each with an epsilon of its own."""
    if not (plan.mechanism.reproducible or plan.config.after) and others_on(dataset, ledger):
        _say_so()


@functools.cache
def _say_so() -> None:
    ranks.warn(
        logger,
        "Another private training in this process has drawn from the same rows, and what that one spent is not in the "
        "epsilon of this one. Whoever keeps both, or looks at both and chooses one by private data, has spent both "
        "(PrivacyConfig(after=...) puts them under one budget). This is said once.",
    )


def _told(dataset: Any) -> Callable[[Any], bool]:
    """What tells it, and others that have rows of it, without keeping it."""
    try:
        known, name = weakref.ref(dataset), getattr(dataset, "_fingerprint", None)
    except TypeError:  # a list, in whose place another one may come to lie
        return lambda other: False

    def is_told(other: Any) -> bool:
        if name is not None and getattr(other, "_fingerprint", None) == name:  # that of one that was loaded again
            return True
        before = known()
        return before is not None and are_in_both(before, other)

    return is_told
