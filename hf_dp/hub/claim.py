"""What a record says in several places must agree: the claim, the config, the ledger and what it was opened for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_dp.accounting import (
    TRAINING_STEP,
    Ledger,
    PrivacyReport,
    check_delta,
    library_versions,
    standard_caveats,
    step_event,
)
from hf_dp.accounting.events import mechanisms
from hf_dp.accounting.neighbours import is_known, read_as
from hf_dp.config import AccountantName
from hf_dp.errors import ConfigurationError, LedgerError, shortened
from hf_dp.hub.card import epsilons, privacy_section
from hf_dp.hub.record import PrivacyRecord, sha256_of_text

# The same computation on another machine; versions of dp_accounting may differ by more, and that is then said.
_TOLERANCE = 1e-6
# Each takes about 0.1 s; a training has one, and one for each kind of release besides its steps.
_MOST_MECHANISMS = 16


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
        different = len(mechanisms(record.ledger.event) or ())
        if different <= _MOST_MECHANISMS:
            return epsilons(record.report, record.ledger)
        problem = f"it has {different} different mechanisms, and at most {_MOST_MECHANISMS} are added up here"
    except (ArithmeticError, RecursionError) as error:
        problem = str(error)
    raise LedgerError(
        f"epsilon cannot be computed from the ledger of {title} ({problem}).",
        why="from a ledger that accountants cannot compute with nothing follows.",
        fix="take the file again from the folder that the private run saved; do not edit it by hand.",
    )


def check_claim(record: PrivacyRecord, found: dict[AccountantName, float]) -> Iterator[Check]:
    report, ledger = record.report, record.ledger
    versions = f" (claimed with dp_accounting {report.versions.get('dp_accounting', 'unknown')})"
    claims: dict[AccountantName, float | None] = {"rdp": report.epsilon_rdp, report.accountant: report.epsilon}
    for name, claimed in claims.items():
        if claimed is not None:
            agrees = same(claimed, found[name])
            said = f"claimed {claimed:.6g}, recomputed {found[name]:.6g}"
            yield Check(f"epsilon ({name.upper()})", agrees, said + ("" if agrees else versions))
    if report.target_epsilon is not None:
        kept = found[report.accountant] <= report.target_epsilon * (1 + _TOLERANCE)
        yield Check("budget", kept, f"spent {found[report.accountant]:.6g} of {report.target_epsilon:g}")
    yield Check("steps", report.steps == ledger.steps, f"claimed {report.steps}, in the ledger {ledger.steps}")
    # The accountants here know no other; under another one the same events would cost more.
    known = all(getattr(report, name) == getattr(PrivacyReport, name) for name in ("unit", "sampling"))
    known &= is_known(report.adjacency)
    yield Check("unit, adjacency and sampling", known, f"{report.unit}; {read_as(report.adjacency)}; {report.sampling}")
    attention, sparse = record.config.re_attention, record.config.sparse_embeddings
    renewals = 1 if sparse is None or sparse.renew_every is None else math.ceil(ledger.steps / sparse.renew_every)
    has_steps, is_released = ledger.steps > 0, attention is not None and attention.token_frequencies == "released"
    # The release comes before the first step; a training may have failed between them.
    frequencies = int(is_released and (has_steps or report.frequency_noise_multiplier is not None))
    releases = {
        "token frequencies": (report.frequency_noise_multiplier, frequencies),
        "choices of rows": (report.row_choice_noise_multiplier, report.row_choices),
    }
    for release, (noise, times) in releases.items():
        there = sum(count for event, count, _ in ledger.entries if mechanisms(event) == {(1.0, noise): 1})
        if noise is not None or times:
            said = f"{times} with noise multiplier {noise} claimed, in the ledger {there}"
            yield Check(release, noise is not None and there == times > 0, said)
    if sparse is not None and sparse.releases_rows and has_steps:
        said = f"{report.row_choices} claimed, {renewals} needed for {ledger.steps} steps"
        yield Check("enough choices of rows", report.row_choices >= renewals, said)
    counts = report.contribution_noise_multiplier
    wanted = report.noise_multiplier * math.hypot(1, sparse.noise_ratio) if sparse and sparse.adapts else None
    if counts is not None or wanted is not None:
        yield Check("counts of rows", same(counts, wanted), f"noise multiplier {counts} claimed, {wanted} follows")
    try:
        check_delta(report.delta, report.dataset_size)
    except ConfigurationError as error:
        yield Check("delta", False, error.found)
    else:
        yield Check("delta", True, f"{report.delta:.3g} is below 1/n = {1 / report.dataset_size:.3g}")
    n = report.dataset_size
    q = report.expected_batch_size / n if n else math.nan
    steps = [event for event, _, label in ledger.entries if label == TRAINING_STEP]
    # The last, since earlier stages of one ledger may have had other batches.
    charged = getattr(steps[-1], "sampling_probability", q) if steps else q
    agrees = same(q, report.sampling_probability) and same(q, charged)
    alike = steps_are(ledger, report.noise_multiplier, q, n, one_stage=report.target_epsilon is not None)
    said_noise = f"noise multiplier {report.noise_multiplier:g} " + ("is" if alike else "is not") + " that of the steps"
    yield Check("noise of the steps", alike, said_noise)
    said = f"expected batch {report.expected_batch_size:g} of n = {n}, charged with {charged:.6g}"
    yield Check("sampling probability", agrees, said)


def steps_are(ledger: Ledger, noise_multiplier: float, q: float, n: int, *, one_stage: bool) -> bool:
    """Whether all training steps were charged with this noise, and the last with this sampling probability.

    Args:
        one_stage: all with this probability, as under a budget. Otherwise earlier ones may have had another expected
            batch size, which is a whole number of the n examples.
    """
    steps = [event for event, _, label in ledger.entries if label == TRAINING_STEP]
    for event in steps:
        other = getattr(event, "sampling_probability", q)
        is_free = not one_stage and event is not steps[-1]
        if is_free and not (0 < other <= 1 and round(other * n) >= 1 and same(other * n, float(round(other * n)))):
            return False
        if event != step_event(noise_multiplier, other if is_free else q):
            return False
    return True


def check_promise(record: PrivacyRecord) -> Iterator[Check]:
    """The claim and the config against what the ledger was opened for: three places that say the same."""
    report, promise = record.report, record.ledger.promise
    config = json.loads(record.config.to_json())
    # As in Plan.promise: not these, and no parts that the run did without.
    left_out = {"seed", "withhold_non_private_logs"}
    left_out |= {name for name in ("re_attention", "sparse_embeddings") if config[name] is None}
    wanted = {
        **{name: value for name, value in config.items() if name not in left_out},
        "dataset_size": report.dataset_size,
        "expected_batch_size": report.expected_batch_size,
        "calibrated_noise_multiplier": report.noise_multiplier,
        "delta": report.delta,
        "reproducible": report.reproducible,
    }
    differing = [
        f"{name}: {value!r} claimed, {promise.get(name, 'absent')!r} in the ledger's promise"
        for name, value in wanted.items()
        if not same(promise.get(name, "absent"), value)
    ]
    differing += [
        f"{name}: {getattr(report, name)!r} in the report, {getattr(record.config, name)!r} in the config"
        for name in ("clipping_norm", "accountant", "target_epsilon")
        if not same(getattr(report, name), getattr(record.config, name))
    ]
    # The config may leave these to be found.
    given = {"noise_multiplier": report.noise_multiplier, "target_delta": report.delta}
    differing += [
        f"{name}: {value!r} in the report, {getattr(record.config, name)!r} in the config"
        for name, value in given.items()
        if getattr(record.config, name) is not None and not same(value, getattr(record.config, name))
    ]
    yield Check("claim, config and ledger's promise", not differing, "; ".join(differing) or "they agree")


def check_words(record: PrivacyRecord) -> Iterator[Check]:
    """What is said in words follows from the rest too, but only the version that wrote it knows how."""
    if not is_of_this_version(record.report):
        return
    wanted = standard_caveats(withholds_logs=record.config.withhold_non_private_logs)
    missing = [caveat for caveat in wanted if caveat not in record.report.caveats]
    added = [str(caveat) for caveat in record.report.caveats if caveat not in wanted]
    said = " ".join([*(f"left out: {caveat}" for caveat in missing), *(f"added: {caveat}" for caveat in added)])
    agree = list(record.report.caveats) == list(wanted)
    yield Check("caveats", agree, "all that hold for this run, and no others" if agree else said or "in another order")
    agrees = sha256_of_text(privacy_section(record.report, record.ledger, record.config)) == record.card_sha256
    yield Check("words of the card", agrees, "they " + ("follow" if agrees else "do not follow") + " from the record")


def is_of_this_version(report: PrivacyReport) -> bool:
    return report.versions.get("hf_dp") == library_versions()["hf_dp"]


def same(one: Any, two: Any) -> bool:
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, two)]
    if all(numbers):
        return math.isclose(one, two, rel_tol=_TOLERANCE)
    return type(one) is type(two) and bool(one == two)
