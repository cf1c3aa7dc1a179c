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
    if not _drew_from(dataset, ledger) and (told := _told(dataset)) is not None:
        _DRAWN.append((told, ledger))


def _drew_from(dataset: Any, ledger: Ledger) -> bool:
    """Whether the training of a ledger of this process did, or one whose weights it went on from."""
    return any(own is ledger and is_told(dataset) for is_told, own in _DRAWN)


class OtherPeople:
    """Trainings of this process of which a promise says that nobody in their data is in this one's.

    Args:
        plan, dataset, ledger: of this one.
    """

    def __init__(self, plan: Plan, dataset: Any, ledger: Ledger) -> None:
        self._is_said, self._dataset, self._ledger = plan.config.other_people, dataset, ledger
        self._asked: list[Ledger] = []

    def __contains__(self, left: Ledger) -> bool:
        """
        Raises:
            LedgerError: it drew from rows of this data, or went on from one that did.
        """
        if not self._is_said or any(left is one for one in self._asked):
            return self._is_said
        if _drew_from(self._dataset, left):
            raise _refusal()
        self._asked.append(left)
        # Of which whoever goes on from this one is asked.
        _DRAWN.extend([(is_told, self._ledger) for is_told, own in _DRAWN if own is left])
        return True


def warn_of_others_on(plan: Plan, dataset: Any, ledger: Ledger) -> None:
    """Says once in a process that several of its trainings drew from the same rows, each with an epsilon of its own."""
    if ledger.steps or plan.mechanism.reproducible or plan.config.after or _say_so.cache_info().currsize:
        return
    if any(own is not ledger and own.own_steps and is_told(dataset) for is_told, own in _DRAWN):
        _say_so()


@functools.cache
def _say_so() -> None:
    ranks.warn(
        logger,
        "Another private training in this process has drawn from the same rows, and what that one spent is not in the "
        "epsilon of this one. Whoever keeps both, or looks at both and chooses one by private data, has spent both "
        "(PrivacyConfig(after=...) puts them under one budget). This is said once.",
    )


def _refusal() -> LedgerError:
    return LedgerError(
        "other_people=True, for weights that another private training in this process left, on rows of this data.",
        why="whoever is in these rows is in both, and epsilon would be without what that one cost them.",
        fix="let that one save (save_model(), or save() of a PrivateRun), and give PrivacyConfig(after=...) with that "
        "folder: both then share one budget. Or begin from weights of before.",
    )


def _told(dataset: Any) -> Callable[[Any], bool] | None:
    """What tells it, and others that have rows of it, without keeping it; None of what is not told later."""
    try:
        known, name = weakref.ref(dataset), getattr(dataset, "_fingerprint", None)
    except TypeError:  # a list, in whose place another one may come to lie
        return None

    def is_told(other: Any) -> bool:
        if name is not None and getattr(other, "_fingerprint", None) == name:  # that of one that was loaded again
            return True
        before = known()
        return before is not None and are_in_both(before, other)

    return is_told
