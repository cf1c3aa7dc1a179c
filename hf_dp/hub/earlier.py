"""Trainings before on the same people: each one's whole record stands in that of the next, to be checked again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_dp.accounting import Ledger, Release
from hf_dp.accounting.earlier import Earlier, check_delta_of, check_number, is_of_earlier, released_by, releases_of
from hf_dp.config.after import name_of
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.figures import upper
from hf_dp.hub.claim import Check, check_claim, check_promise, recomputed
from hf_dp.hub.record import PrivacyRecord, sha256_of_record


def trainings(after: str | None, earlier: str | None) -> tuple[Earlier, ...]:
    """What a mechanism says of the trainings before it, the first of them first.

    Args:
        after: where the training after them says that the last of them lies.
        earlier: the record of that, as it was written; None if there is none.

    Raises:
        LedgerError: a record that is none.
        ConfigurationError: too many, or one that nothing names.
    """
    if earlier is None:
        return ()
    record = PrivacyRecord.from_json(earlier)
    before = trainings(record.config.after, record.earlier)
    check_number(len(before) + 1)
    name = name_of(after)
    if name is None:
        raise ConfigurationError(
            "a record with that of an earlier training, and a config without after.",
            why="of two that disagree nothing follows.",
            fix="use a record as hf_dp wrote it.",
        )
    one = Earlier(
        name=name,
        record_sha256=sha256_of_record(earlier),
        unit=record.mechanism.unit,
        epsilon=record.report.epsilon,
        delta=record.report.delta,
        reproducible=record.mechanism.reproducible,
        releases=released_by(record.ledger, len(before) + 1),
    )
    return (*before, one)


def records(earlier: str | None) -> Iterator[str]:
    """Those of the trainings before, as they were written, the last of them first."""
    while earlier is not None:
        yield earlier
        earlier = PrivacyRecord.from_json(earlier).earlier


def check_other_people(earlier: str | None, other_people: bool) -> None:
    """Refuse silence about a training that one before this says was on other people (`ConfigurationError`)."""
    if not other_people and any(PrivacyRecord.from_json(one).config.other_people for one in records(earlier)):
        raise ConfigurationError(
            "a training after one with other_people=True, which does not say it too.",
            why="the one before says that of its own people. Who is in this data, and in that which was trained on "
            "before both, has spent more there, and neither record tells of it.",
            fix="where nobody is in both, give PrivacyConfig(after=..., other_people=True); otherwise train the first "
            "ones again, each after the other.",
        )


def has_all_of(ledger: Ledger, other: Ledger) -> bool:
    """Whether a ledger is `other`, or what became of it."""
    is_longer = ledger.steps >= other.steps and ledger.charges >= other.charges
    return is_longer and Ledger(ledger.promise).promise == Ledger(other.promise).promise


def check_earlier(record: PrivacyRecord) -> Iterator[Check]:
    """Earlier trainings: that their own claims follow, and that all that they released is in this ledger."""
    told = record.mechanism.earlier
    charged = [made for made in record.ledger.releases if is_of_earlier(made.label)]
    if record.earlier is None and record.config.after is None and not told and not charged:
        return
    try:
        follow = trainings(record.config.after, record.earlier)
    except (ConfigurationError, LedgerError) as error:
        yield Check("earlier trainings", False, error.found)
        return
    said = f"{_names(told)} in the mechanism, {_names(follow)} in the record that it holds of them"
    yield Check("earlier trainings", told == follow, said)
    agree = _times(charged) == _times(releases_of(follow))
    said = "all in the ledger" if agree else "not what the ledger holds under their labels"
    yield Check("what earlier trainings released", agree, said)
    for one in follow:
        try:
            check_delta_of(one, record.report.delta)
        except ConfigurationError as error:
            yield Check(f"delta, and {one.name}", False, error.found)
    try:
        check_other_people(record.earlier, record.config.other_people)
    except ConfigurationError as error:
        yield Check("other people", False, error.found)
    if record.earlier is not None:
        yield _check_alone(record.earlier, follow[-1])


def _check_alone(earlier: str, one: Earlier) -> Check:
    record = PrivacyRecord.from_json(earlier)
    try:
        found = recomputed(record, one.name)
        checks = [*check_claim(record, found), *check_promise(record), *check_earlier(record)]
        wrong = [f"{check.name}: {check.found}" for check in checks if not check.passed]
    except LedgerError as error:
        wrong = [error.found]
    # Its card's metadata gives the same digest.
    follows = f"epsilon {upper(one.epsilon, 4)} followed from its ledger; SHA-256 of its record {one.record_sha256}"
    return Check(f"claim of {one.name}", not wrong, "; ".join(wrong) or follows)


def _times(releases: Sequence[Release]) -> dict[tuple[str, str], int]:
    return {(one.label, repr(one.event)): one.times for one in releases}


def _names(earlier: Sequence[Earlier]) -> str:
    return ", ".join(one.name for one in earlier) or "none"
