"""Is a published epsilon what its ledger says, for the files that lie there? And what does that prove?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from hf_dp.accounting import PrivacyReport
from hf_dp.accounting.earlier import is_of_earlier
from hf_dp.audit.outcome import LOW_AND_TOLD
from hf_dp.config import AccountantName
from hf_dp.config.after import places_of
from hf_dp.errors import ConfigurationError, LedgerError, shortened
from hf_dp.hub.audited import check_audit
from hf_dp.hub.claim import (
    Check,
    check_claim,
    check_promise,
    check_words,
    is_of_this_version,
    recomputed,
    versions_differ,
)
from hf_dp.hub.earlier import check_earlier
from hf_dp.hub.files import ABOUT_LOADING, beside, check_files, folders_of_their_own, is_left_over
from hf_dp.hub.page import base_beside, check_card
from hf_dp.hub.record import LARGEST_EARLIER, RECORD_FILE, VERSION, PrivacyRecord, as_written
from hf_dp.hub.source import Source, open_source
from hf_dp.versions import library_versions

PROVEN = (
    "The stated epsilon follows from the ledger: what is said to have been released costs no more at this delta.",
    "The weights (or the texts sampled from them) are the files that the record was written for, and what the card's "
    "metadata has under differential_privacy says what the record says.",
)
IN_WORDS = "The card's privacy section says what the record says, and nothing else."
NOT_PROVEN = (
    "That the training happened as the ledger says, on that many units of that kind, with secret noise. "
    "A publisher who lies in all files alike is believed; ask for the code, or for an audit.",
    "That nothing else computed from the same data was published: other runs add up with this one.",
    "What the card says outside its privacy section, and in other metadata; in the words of another version of hf_dp, "
    "in that section too.",
    "Anything that the card lists as not covered.",
)


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        source: the directory, or the repository with its commit.
        report: the claim.
        epsilons: recomputed from the ledger alone, by accountant, in nats.
        checks: all comparisons, those that failed included.
        notes: what a reader should know besides.
        knows_the_words: the record is of this version of hf_dp, which knows the words that go with it.
    """

    source: str
    report: PrivacyReport
    epsilons: dict[AccountantName, float]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    knows_the_words: bool

    @property
    def consistent(self) -> bool:
        """Every comparison agrees."""
        return all(check.passed for check in self.checks)

    @property
    def private(self) -> bool:
        """Every comparison agrees, and what they agree on is a private model."""
        return self.consistent and self.report.private

    @property
    def proven(self) -> tuple[str, ...]:
        """What follows where every comparison agrees."""
        words = (IN_WORDS,) if self.knows_the_words else ()
        return (*PROVEN, *words) if self.consistent else ()


def load_report(
    repo_or_directory: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> PrivacyReport:
    """The privacy that a saved or published model claims. It is read, not checked: see `hf-dp verify`.

    Args:
        repo_or_directory: a folder that DPTrainer saved, or a repository "owner/name" on the hub.
        revision: a branch, tag or commit of the repository.
        token: to read a private repository.

    Raises:
        LedgerError: no `privacy.json`, or one that is damaged or of an unknown version.
        HubError: the repository cannot be read.
    """
    return open_source(repo_or_directory, revision=revision, token=token).record().report


def verify(
    repo_or_directory: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None
) -> Verification:
    """Recompute epsilon from the ledger, and compare it with the claim, the card and the files. Loads no model.

    Args, Raises: as `load_report`.
    """
    source = open_source(repo_or_directory, revision=revision, token=token)
    return _verified(source, source.record())


def read_earlier(after: tuple[str, ...] | str | None) -> tuple[str, ...]:
    """The records of earlier trainings on the same people, as they were written, after they were verified.

    Args:
        after: see `PrivacyConfig`. What else would be loaded with the weights there does not matter. None: none.

    Raises:
        LedgerError: one is missing or damaged, or something in it does not agree.
        HubError: one cannot be read.
        ConfigurationError: together they are longer than a record may be.
    """
    found = tuple(map(_read, places_of(after)))
    if (together := sum(map(len, found))) > LARGEST_EARLIER:
        raise ConfigurationError(
            f"after={after!r}, where records lie of {together} characters together.",
            why=f"they stand whole in the record of this training, which nobody would read beyond {LARGEST_EARLIER} "
            "of them.",
            fix="begin from a later training that goes on after these, or plan fewer and longer ones.",
        )
    return found


def _read(after: str) -> str:
    source = open_source(after)
    text = source.path(RECORD_FILE).read_bytes()
    found = _verified(source, PrivacyRecord.from_json(text))
    failed = [check for check in found.checks if not check.passed and check.name not in ABOUT_LOADING]
    if failed:
        wrong = "; ".join(f"{check.name}: {check.found}" for check in failed)
        raise LedgerError(
            f"after={after!r} does not verify: {wrong}.",
            why="what was spent before would be what a record says that does not agree with itself or with its files.",
            fix="give the folder as the private training saved it; hf-dp verify says all that differs.",
        )
    return as_written(json.loads(text))


def _verified(source: Source, record: PrivacyRecord) -> Verification:
    found = recomputed(record, source.title)
    checks = [*check_claim(record, found), *check_promise(record), *check_words(record), *check_earlier(record)]
    checks += [*check_audit(record), *check_files(source, record), *check_card(source, record)]
    # Each on one line: files can have names of several.
    notes = tuple(shortened(" ".join(note.split("\n"))) for note in _notes(source, record))
    title, words = shortened(source.title), is_of_this_version(record)
    return Verification(title, record.report, found, tuple(checks), notes, words)


def _notes(source: Source, record: PrivacyRecord) -> Iterator[str]:
    report = record.report
    if not report.private:
        yield "This is not a private model: " + ("a seed was given." if report.reproducible else "epsilon is infinite.")
    if report.dataset_size is None:
        of = "examples" if record.config.unit is None else "units"
        yield (
            f"How many {of} there are is secret: that delta is below 1/n, and that the sampling probability, the "
            "steps and delta were chosen without a look at n, is the word of whoever published it."
        )
    if (said := versions_differ(report)) is not None:
        yield said
    if not is_of_this_version(record):
        yield (
            f"The card and its caveats are in the words of hf_dp {report.versions.get('hf_dp')} and version "
            f"{record.version} of {RECORD_FILE}; this is {library_versions()['hf_dp']}, which writes {VERSION}, "
            "and compared them with the record's digest, and the numbers of the card's table, alone."
        )
    planned = {release.label for release in record.mechanism.releases}
    released = {one.label for one in report.releases if not is_of_earlier(one.label)}
    if named := sorted(released - planned):
        yield f"Releases that no config asks for, in words of whoever published them: {', '.join(map(repr, named))}."
    if (base := base_beside(source, record)) is not None:
        yield f"The adapter is loaded onto {base!r}, which the card's metadata does not name as its base_model."
    if record.audit is not None:
        yield f"{record.audit} {LOW_AND_TOLD}"
    if record.corpus and not record.weights:
        yield (
            "Texts, and no model: that they were sampled from the model of this ledger, and that none was chosen by "
            "looking at the private data, is the word of whoever published them."
        )
    if others := sorted(folders_of_their_own(source, record)):
        yield f"Models in folders of their own are not checked here: {', '.join(others)}. Verify each for itself."
    claimed = tuple(f"{other}/" for other in others)
    names = {name for name in beside(source, record) if not name.startswith(claimed) and not is_left_over(name)}
    if tops := sorted({name.split("/")[0] for name in names}):
        yield f"Nothing is claimed of what lies in folders without a privacy.json: {', '.join(tops)}."
    local = sorted({name.split("/")[0] for name in source.names - set(record.files) if is_left_over(name)})
    if local and source.is_local:
        yield f"For your own eyes, never published by hf_dp: {', '.join(local)}."
