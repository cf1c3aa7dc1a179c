"""Which private trainings of this process drew from the same rows, or went on from one of them: whoever is in one is in
the others."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger
from hf_dp.config.after import names_of
from hf_dp.data.repeated import are_in_both
from hf_dp.errors import LedgerError
from hf_dp.hub.earlier import records
from hf_dp.hub.record import PrivacyRecord, sha256_of_record
from hf_dp.step.plan import Plan

logger = logging.getLogger(__name__)

_DRAWN: list[tuple[Callable[[Any], bool], Ledger]] = []
# Of all trainings of this process, whatever they drew from.
_LEDGERS: list[Ledger] = []


def note_rows(dataset: Any, ledger: Ledger) -> None:
    """A training of this ledger draws from `dataset`. Of a list that is not known later."""
    if all(own is not ledger for own in _LEDGERS):
        _LEDGERS.append(ledger)
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


def warn_of_others_on(plan: Plan, dataset: Any, ledger: Ledger, goes_on_from: str | None = None) -> None:
    """Says once in a process that several of its trainings drew from the same rows, each with an epsilon of its own.

    Args:
        goes_on_from: the seal of the checkpoint that `ledger` was read from, if it was: what lies before it, and beside
            it, is said where that is.
    """
    if plan.mechanism.reproducible or plan.config.after or _say_so.cache_info().currsize:
        return
    if ledger.steps and goes_on_from is None:
        return
    along = [ledger, *_along(goes_on_from)]
    if any(own.own_steps and all(own is not one for one in along) and is_told(dataset) for is_told, own in _DRAWN):
        _say_so()


def _along(seal: str | None) -> list[Ledger]:
    """Of the trainings of this process those that wrote the checkpoint with this seal, began with it, or are joined to
    one of these by other checkpoints."""
    found: list[Ledger] = []
    seals = set() if seal is None else {seal}
    while more := [own for own in _LEDGERS if own.sealed & seals and all(own is not one for one in found)]:
        found += more
        seals |= {each for own in more for each in own.sealed}
    return found


def warn_of_another_branch(plan: Plan, ledger: Ledger, name: str, seal: str | None) -> None:
    """Says that a training of this process has gone on from the checkpoint too, from which this one goes on.

    Args:
        ledger: of this one, with what is in the checkpoint.
        name, seal: of the checkpoint.
    """
    longer = [own for own in _LEDGERS if own is not ledger and seal in own.sealed and own.steps > ledger.steps]
    if not longer or plan.mechanism.reproducible:
        return
    more = max(own.steps for own in longer) - ledger.steps
    ranks.warn(
        logger,
        "Another training in this process has made %s since %r, from which this one goes on: what those spent is not "
        "in its epsilon, and cost nothing only if nobody has seen what came of it. Where both are kept, or anyone saw "
        "the other, the people in the data have spent both.",
        *(_private_steps(more), name),
    )


def warn_of_what_went_on(plan: Plan) -> None:
    """Says that a training before, which this process made, went on after its record that a promise names."""
    known = {sha256_of_record(one): PrivacyRecord.from_json(one).ledger.steps for one in records(plan.earlier)}
    named = dict(zip(map(sha256_of_record, plan.earlier), names_of(plan.config.after), strict=True))
    for own in _LEDGERS:
        digests = own.written & known.keys()
        if not digests or own.steps <= (steps := max(known[digest] for digest in digests)):
            continue
        last = next(digest for digest in digests if known[digest] == steps)
        ranks.warn(
            logger,
            "A training in this process has made %s since it saved %r, which after= names: what those spent is not in "
            "the epsilon of both. If what came of it is kept, or anyone saw it, save it, and name that.",
            *(_private_steps(own.steps - steps), named.get(last, "what a training before")),
        )


def _private_steps(number: int) -> str:
    return f"{number} private step{'s' * (number > 1)}"


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
