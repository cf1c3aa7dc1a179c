"""An audit in a record: put there after the training, and held against the claim. It changes no promise."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from hf_dp.accounting.events import primitives
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.audit.outcome import Audit
from hf_dp.errors import LedgerError
from hf_dp.figures import lower, percent, upper
from hf_dp.hub.card_file import write_card
from hf_dp.hub.charged import same
from hf_dp.hub.claim import Check, epsilon_tolerance, is_of_this_version
from hf_dp.hub.record import RECORD_FILE, PrivacyRecord

AGAINST = "audit and claim"


def add_audit(directory: str | os.PathLike[str], audit: Audit) -> None:
    """Writes into `privacy.json` and the card of a saved model what attacks on its training found, whatever it was.

    Raises:
        LedgerError: no record that can be read, one of another version, or an audit that cannot be of this training.
    """
    path = Path(directory) / RECORD_FILE
    record = PrivacyRecord.from_json(path.read_bytes())
    if not is_of_this_version(record):
        raise LedgerError(
            f"the record in {str(directory)!r} is in the words of another version of hf_dp.",
            why="its card would have to be written anew, in words that were not said of that training.",
            fix="audit with the version that trained, which the record names.",
        )
    record = dataclasses.replace(record, audit=audit)
    if wrong := [check for check in check_audit(record) if not check.passed and check.name != AGAINST]:
        raise LedgerError(
            f"{wrong[0].name}: {wrong[0].found}.",
            why="what stands in a record is what verify would find again.",
            fix="audit this training, with the delta of its claim.",
        )
    aside = path.with_name(f"_{RECORD_FILE}")
    aside.write_text(record.to_json(), encoding="utf-8")
    os.replace(aside, path)
    write_card(directory, record=record)


def _is_gaussian(record: PrivacyRecord) -> bool:
    """Whether all that was released, earlier trainings included, has Gaussian noise and every unit in it."""
    used = primitives(record.ledger.event)
    return used is not None and all(isinstance(one, Gaussian) and one.probability == 1 for one in used)


def check_audit(record: PrivacyRecord) -> Iterator[Check]:
    """That the bounds follow from the counts, are about this claim, and are not above it; where there is an audit.

    Not whether the attacks were made.
    """
    if record.audit is None:
        return
    report, audit = record.report, record.audit
    wrong = []
    for name, found in audit.attacks.items():
        if not same(dataclasses.asdict(found.again()), dataclasses.asdict(found)):
            wrong.append(
                f"{name}: epsilon {lower(found.epsilon, 6)}, from its counts {lower(found.again().epsilon, 6)}"
            )
        if found.delta != report.delta:
            wrong.append(f"{name}: at delta {found.delta:g}, and the claim is at {report.delta:g}")
        if report.dataset_size is not None and found.canaries > report.dataset_size:
            wrong.append(f"{name}: {found.canaries} canaries among {report.dataset_size} units")
        if found.mu is not None and not _is_gaussian(record):
            wrong.append(f"{name}: of a Gaussian mechanism, and not all that was released is one (units were sampled)")
    yield Check("audit", not wrong, "; ".join(wrong) or "its bounds follow from its counts")
    holds = audit.epsilon <= report.epsilon * (1 + epsilon_tolerance(report))
    bound = f"epsilon is at least {lower(audit.epsilon, 4)}, {upper(report.epsilon, 4)} is claimed"
    yield Check(
        AGAINST,
        holds,
        bound
        + ("" if holds else f": with confidence {percent(audit.confidence)} the claim is wrong, if the audit is right"),
    )
