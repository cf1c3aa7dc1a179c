"""Trainings before on the same people: each one's whole record stands in that of the next, to be checked again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hf_dp.accounting import Ledger, Release
from hf_dp.accounting.earlier import Earlier, check_delta_of, check_number, is_of_earlier, released_by, releases_of
from hf_dp.config.after import names_of
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.figures import upper
from hf_dp.hub.claim import Check, check_claim, check_promise, recomputed
from hf_dp.hub.record import PrivacyRecord, sha256_of_record


def trainings(after: tuple[str, ...] | str | None, earlier: Sequence[str]) -> tuple[Earlier, ...]:
    """What a mechanism says of the trainings before it, each after those before it.

    A record that several of them name is of one training, and counted once: its digest is that of its weights too,
    which are noise. Of texts alone it could be of two, and is counted as often as it is named.

    Args:
        after: where the training after them says that they lie.
        earlier: the records there, as they were written; none if there are none.

    Raises:
        LedgerError: a record that is none.
        ConfigurationError: too many, one that nothing names, or one that two names name.
    """
    found: dict[tuple[str, int], Earlier] = {}
    given: dict[str, str] = {}
    for name, text in zip(names_of(after), earlier, strict=False):
        if not PrivacyRecord.from_json(text).weights:
            continue
        if (other := given.setdefault(sha256_of_record(text), name)) != name:
            raise ConfigurationError(
                f"after={after!r}: {other} and {name} are one training.",
                why="what one training spent is paid once, and its name stands beside it.",
                fix="name it once.",
            )
    _add(found, after, earlier, given)
    return tuple(found.values())


def _add(
    found: dict[tuple[str, int], Earlier],
    after: tuple[str, ...] | str | None,
    earlier: Sequence[str],
    given: Mapping[str, str],
) -> None:
    """Those that are not there yet, of each the ones before it first; by digest, the names that weights are `given`."""
    names = names_of(after)
    if earlier and len(names) != len(earlier):
        raise ConfigurationError(
            f"a record with those of {len(earlier)} earlier trainings, and a config with {len(names)} in after.",
            why="of two that disagree nothing follows.",
            fix="use a record as hf_dp wrote it.",
        )
    for name, text in zip(names, earlier, strict=False):
        record, digest = PrivacyRecord.from_json(text), sha256_of_record(text)
        _add(found, record.config.after, record.earlier, given)
        key = digest, 0 if record.weights else len(found)
        if key in found:
            continue
        check_number(len(found) + 1)
        found[key] = Earlier(
            name=given.get(digest, name),
            record_sha256=digest,
            unit=record.mechanism.unit,
            epsilon=record.report.epsilon,
            delta=record.report.delta,
            reproducible=record.mechanism.reproducible,
            releases=released_by(record.ledger, len(found) + 1),
        )


def records(earlier: Sequence[str]) -> Iterator[str]:
    """Those of the trainings before, as they were written, the last of them first; of shared ones each time."""
    for text in reversed(earlier):
        yield text
        yield from records(PrivacyRecord.from_json(text).earlier)


def check_other_people(earlier: Sequence[str], other_people: bool) -> None:
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
    if not (record.earlier or record.config.after or told or charged):
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
    by_digest = {one.record_sha256: one for one in follow}
    for text in record.earlier:
        yield _check_alone(text, by_digest[sha256_of_record(text)])


def _check_alone(text: str, one: Earlier) -> Check:
    record = PrivacyRecord.from_json(text)
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
