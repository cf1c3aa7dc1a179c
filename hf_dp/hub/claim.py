"""What a record says in several places must agree: the claim, the config, the ledger and what it was opened for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hf_dp.accounting import (
    TRAINING_STEP,
    PrivacyReport,
    Release,
    check_delta,
    in_words,
    unit_terms,
)
from hf_dp.accounting.events import MOST_MECHANISMS, primitives
from hf_dp.accounting.neighbours import SAID_BEFORE, ZERO_OUT
from hf_dp.accounting.risk import risk
from hf_dp.accounting.units import as_said_today
from hf_dp.config import AccountantName
from hf_dp.config.asked import asked
from hf_dp.config.ranges import is_probability
from hf_dp.errors import ConfigurationError, LedgerError, shortened
from hf_dp.figures import upper
from hf_dp.hub.card import privacy_section
from hf_dp.hub.charged import TOLERANCE, charged_with, same, steps_are
from hf_dp.hub.record import VERSION, PrivacyRecord, sha256_of_text
from hf_dp.versions import library_versions

# That of other versions of hf_dp or dp_accounting.
_OF_OTHER_VERSIONS = 1e-3
# Numbers that other machines and versions compute a little otherwise, and words.
_CHECKED_APART = {"epsilon", "epsilon_rdp", "versions", "caveats", "steps", "adjacency"}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what was compared.
        passed: whether it agrees.
        found: what was found, in words.
    """

    name: str
    passed: bool
    found: str

    def __post_init__(self) -> None:
        for part in ("name", "found"):
            object.__setattr__(self, part, shortened(getattr(self, part)))


def recomputed(record: PrivacyRecord, title: str) -> dict[AccountantName, float]:
    """Epsilon of the record's ledger alone, by accountant, in nats.

    Args:
        title: where the record is from, in words.

    Raises:
        LedgerError: it cannot be computed, or not soon.
    """
    try:
        different = len(primitives(record.ledger.event) or ())
        if different <= MOST_MECHANISMS:
            return record.ledger.epsilons(record.report.delta)
        problem = f"it has {different} different mechanisms, and at most {MOST_MECHANISMS} are added up here"
    except (ArithmeticError, RecursionError) as error:
        problem = str(error)
    raise LedgerError(
        f"epsilon cannot be computed from the ledger of {title} ({problem}).",
        why="from a ledger that accountants cannot compute with nothing follows.",
        fix="take the file again from the folder that the private run saved; do not edit it by hand.",
    )


def check_claim(record: PrivacyRecord, found: dict[AccountantName, float]) -> Iterator[Check]:
    report, ledger = record.report, record.ledger
    tolerance, versions = epsilon_tolerance(report), f" (claimed with {versions_in_words(report.versions)})"
    claims: list[tuple[AccountantName, float | None]] = [(report.accountant, report.epsilon)]
    if ("rdp", report.epsilon_rdp) not in claims:  # the cross-check
        claims.insert(0, ("rdp", report.epsilon_rdp))
    for name, claimed in claims:
        if claimed is not None and name not in found:
            yield Check(
                f"epsilon ({name.upper()})", False, f"claimed {upper(claimed, 6)}, of what this accountant has not"
            )
        elif claimed is not None:
            agrees = same(claimed, found[name], tolerance)
            said = f"claimed {upper(claimed, 6)}, recomputed {upper(found[name], 6)}"
            yield Check(f"epsilon ({name.upper()})", agrees, said + ("" if agrees else versions))
    if report.target_epsilon is not None and report.accountant in found:
        kept = found[report.accountant] <= report.target_epsilon * (1 + tolerance)
        yield Check("budget", kept, f"spent {upper(found[report.accountant], 6)} of {report.target_epsilon:g}")
    if report.target_tpr is not None:
        most = risk(ledger.event, (report.at_fpr,)).true_positive_rates[report.at_fpr]
        said = (
            f"an attack finds {upper(most, 6)} of {report.target_tpr:g} at a false positive rate of {report.at_fpr:g}"
        )
        yield Check("budget", most <= report.target_tpr * (1 + tolerance), said)
    yield Check("steps", report.steps == ledger.steps, f"claimed {report.steps}, in the ledger {ledger.steps}")
    yield _check_neighbours(record)
    yield _check_what_follows(record)
    yield from _check_releases(record)
    yield _check_delta(record)
    n, q = _drawn_from(record), _probability(record)
    steps = [event for event, _, label in ledger.entries if label == TRAINING_STEP]
    # The last, since earlier stages of one ledger may have had other batches.
    charged = charged_with(steps[-1], q) if steps else q
    agrees = same(q, report.sampling_probability) and same(q, charged)
    one_stage, noise = record.config.noise_multiplier is None, report.noise_multiplier
    alike = is_probability(q) and steps_are(
        ledger, dataclasses.replace(record.mechanism.sampling, probability=q), noise, record.mechanism.unit, n,
        one_stage=one_stage,
    )  # fmt: skip
    said_noise = f"noise multiplier {report.noise_multiplier:g} " + ("is" if alike else "is not") + " that of the steps"
    yield Check("noise of the steps", alike, said_noise)
    of_how_many = f"n = {n}" if report.drawn_from is None else f"{n} examples"
    of_how_many = of_how_many if report.dataset_size is not None else f"{n}, which stands for n"
    from_n = f"expected batch {report.expected_batch_size:g} of {of_how_many}"
    said = f"{f'{q:.6g} whatever n is' if n is None else from_n}, charged with {charged:.6g}"
    yield Check("sampling probability", agrees, said)


def _size(record: PrivacyRecord) -> int | None:
    """n, or what stands for it; None where the sampling probability does."""
    return record.config.dataset_size if record.report.dataset_size is None else record.report.dataset_size


def _drawn_from(record: PrivacyRecord) -> int | None:
    """How many are drawn from, of which q is a share, or what stands for it."""
    return record.report.drawn_from or _size(record)


def _check_delta(record: PrivacyRecord) -> Check:
    report, size = record.report, _size(record)
    if size is None:
        # Whatever n is; also of a single one.
        said = f"{upper(report.delta, 3)}, a number of its own: 1/n is secret, as n is, and at most 0.5"
        return Check("delta", report.delta < 1 / 2, said)
    try:
        check_delta(report.delta, size)
    except ConfigurationError as error:
        return Check("delta", False, error.found)
    return Check("delta", True, f"{upper(report.delta, 3)} is below 1/n = {1 / size:.3g}")


def _probability(record: PrivacyRecord) -> float:
    """The sampling probability that was promised, or that follows from n; NaN where neither is there."""
    n, given = _drawn_from(record), record.config.sampling_probability
    follows = math.nan if not n else record.report.expected_batch_size / n
    return follows if given is None else given


def _check_neighbours(record: PrivacyRecord) -> Check:
    """The relation that the accountants compute epsilon for; under another one the same events would cost more.

    Of one example more or less it is only where the config gives the sampling probability: if that followed from n,
    everybody's would be another.
    """
    said, holds = record.report.adjacency, record.mechanism.unit.adjacency
    promised = unit_terms(1, record.config, 1).adjacency  # whatever their number
    if holds != promised:
        return Check("neighbouring datasets", False, f"{holds} in the mechanism, {promised} follows from the config")
    # Earlier versions knew no other words.
    if record.version < VERSION and (said, holds) == (SAID_BEFORE, ZERO_OUT):
        return Check("neighbouring datasets", True, f"{said}, that is: {holds}")
    return Check("neighbouring datasets", said == holds, said if said == holds else f"{said} claimed, {holds} follows")


def _check_what_follows(record: PrivacyRecord) -> Check:
    """Every number and word of the report that follows from the mechanism, the ledger and the config."""
    follows = record.mechanism.report(record.ledger, record.config)
    claimed, unit = record.report, record.mechanism.unit
    today: dict[str, object] = {"unit": as_said_today(claimed.unit, unit)}
    today["earlier"] = tuple(as_said_today(one, unit) for one in claimed.earlier)
    differing = [
        f"{name}: {_told(value)} claimed, {_told(wanted)} follows"
        for name, value in vars(claimed).items()
        if name not in _CHECKED_APART
        and not same(value, wanted := getattr(follows, name))
        and not (name in today and today[name] == wanted)
    ]
    if names := claimed.versions.keys() ^ library_versions().keys():
        differing.append(f"versions: missing or unknown {', '.join(sorted(names))}")
    return Check("claim and mechanism", not differing, "; ".join(differing) or "the claim follows")


def _check_releases(record: PrivacyRecord) -> Iterator[Check]:
    """What was asked for beside the steps was planned, and what was planned was made, no more often and in time."""
    mechanism, made = record.mechanism, record.ledger.releases
    shares, queries = asked(record.config, mechanism.steps)
    wanted = [(share.label, share.times, share.every) for share in shares]
    planned = [(release.label, release.times, release.every) for release in mechanism.releases]
    agree = sorted(map(str, wanted)) == sorted(map(str, planned)) and set(queries) == set(mechanism.queries)
    if wanted or planned or queries or mechanism.queries:
        labels = ", ".join([*(release.label for release in mechanism.releases), *(q.label for q in mechanism.queries)])
        asked_for = ", ".join([*(share.label for share in shares), *(query.label for query in queries)])
        yield Check("what the config asks for", agree, f"{labels or 'nothing'} planned, {asked_for or 'nothing'} asked")
    for release in mechanism.releases:
        alike = [one for one in made if one.label == release.label]
        times, due = sum(one.times for one in alike), release.due(record.ledger.steps)
        kept = due <= times <= release.times and all(one.event == release.event for one in alike) and release.is_of_all
        said = f"{times} in the ledger ({_told(alike) if alike else 'none'}), {due} due, {release.times} planned"
        yield Check(release.label, kept, f"{said} ({in_words(release.event)})")


def _told(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_told, value)) or "nothing"
    return f"{value.times} x {value.label}: {in_words(value.event)}" if isinstance(value, Release) else repr(value)


def check_promise(record: PrivacyRecord) -> Iterator[Check]:
    """The mechanism and the config against what the ledger was opened for: three places that say the same."""
    mechanism, config, promise = record.mechanism, record.config, record.ledger.promise
    claimed = mechanism.promise(config)
    differing = [
        f"{name}: {claimed.get(name, 'nothing')!r} claimed, {promise.get(name, 'absent')!r} in the ledger's promise"
        for name in {**claimed, **promise}
        if not same(promise.get(name, "absent"), claimed.get(name, "nothing"))
    ]
    differing += [
        f"{name}: {said!r} in the mechanism, {wanted!r} in the config"
        for name, (said, wanted) in mechanism.beside(config).items()
        if not same(said, wanted)
    ]
    yield Check("mechanism, config and ledger's promise", not differing, "; ".join(differing) or "they agree")


def check_words(record: PrivacyRecord) -> Iterator[Check]:
    """What is said in words follows from the rest too, but only the version that wrote it knows how."""
    if not is_of_this_version(record):
        return
    wanted = record.mechanism.report(record.ledger, record.config).caveats
    missing = [caveat for caveat in wanted if caveat not in record.report.caveats]
    added = [str(caveat) for caveat in record.report.caveats if caveat not in wanted]
    said = " ".join([*(f"left out: {caveat}" for caveat in missing), *(f"added: {caveat}" for caveat in added)])
    agree = list(record.report.caveats) == list(wanted)
    yield Check("caveats", agree, "all that hold for this run, and no others" if agree else said or "in another order")
    words = privacy_section(record.report, record.ledger, record.config, saved=record.saved)
    agrees = sha256_of_text(words) == record.card_sha256
    yield Check("words of the card", agrees, "they " + ("follow" if agrees else "do not follow") + " from the record")


def epsilon_tolerance(report: PrivacyReport) -> float:
    """Up to which relative difference two epsilons of one ledger are the same. A forger can claim any versions."""
    return TOLERANCE if report.versions == library_versions() else _OF_OTHER_VERSIONS


def versions_differ(report: PrivacyReport) -> str | None:
    """That epsilon was claimed with other versions than it is computed with here; None if it was not."""
    here = library_versions()
    if report.versions == here:
        return None
    return (
        f"Epsilon was claimed with {versions_in_words(report.versions)}, and computed here with "
        f"{versions_in_words(here)}: a difference of up to {100 * _OF_OTHER_VERSIONS:g} % counts as none."
    )


def versions_in_words(versions: Mapping[str, str]) -> str:
    """The versions of a record, or those that are installed."""
    return " and ".join(f"{name} {versions.get(name, 'unknown')}" for name in library_versions())


def is_of_this_version(record: PrivacyRecord) -> bool:
    return record.version == VERSION and record.report.versions.get("hf_dp") == library_versions()["hf_dp"]
