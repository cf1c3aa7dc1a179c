"""Is a published epsilon what its ledger says, for the files that lie there? And what does that prove?"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import dp_accounting as dp
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from hf_dp.accounting import (
    TRAINING_STEP,
    PrivacyReport,
    check_delta,
    library_versions,
    standard_caveats,
    step_event,
)
from hf_dp.accounting.events import mechanisms
from hf_dp.config import AccountantName
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub.card import BEGIN, END, METADATA_KEY, epsilons, metadata, privacy_section
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord, sha256, sha256_of_text
from hf_dp.hub.saved import may_be_published
from hf_dp.hub.source import Source, open_source

# The same computation on another machine; versions of dp_accounting may differ by more, and that is then said.
_TOLERANCE = 1e-6
# What from_pretrained would load, or run, in place of or beside the files that were saved.
_LOADED = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf", ".onnx", ".py"}
_STEERING = {"config.json", "adapter_config.json", "generation_config.json"}
# What Trainer leaves beside a model on the machine that trained it, and nothing loads with the model.
_LOCAL = {"training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt"}

PROVEN = (
    "The stated epsilon follows from the ledger: what is said to have been released costs no more at this delta.",
    "The weights (or the texts sampled from them) are the files that the record was written for, and the card's "
    "metadata says what the record says.",
)
IN_WORDS = "The card's privacy section says what the record says, and nothing else."
NOT_PROVEN = (
    "That the training happened as the ledger says, on that many units of that kind, with secret noise. "
    "A publisher who lies in all files alike is believed; ask for the code, or for an audit.",
    "That nothing else computed from the same data was published: other runs add up with this one.",
    "What the card says outside its privacy section; in the words of another version of hf_dp, in that section too.",
    "Anything that the card lists as not covered.",
)


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


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        source: the directory, or the repository with its commit.
        report: the claim.
        epsilons: recomputed from the ledger alone, by accountant, in nats.
        checks: all comparisons, those that failed included.
        notes: what a reader should know besides.
    """

    source: str
    report: PrivacyReport
    epsilons: dict[AccountantName, float]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

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
        words = (IN_WORDS,) if _is_of_this_version(self.report) else ()
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
    record = source.record()
    try:
        found = epsilons(record.report, record.ledger)
    except (ArithmeticError, RecursionError) as error:
        raise LedgerError(
            f"epsilon cannot be computed from the ledger of {source.title} ({error}).",
            why="a number in it is beyond what accountants compute with, so nothing follows from it.",
            fix="take the file again from the folder that the private run saved; do not edit it by hand.",
        ) from error
    checks = [*_claim(record, found), *_promise(record), *_words(record)]
    checks += [*_files(source, record), *_card(source, record)]
    return Verification(source.title, record.report, found, tuple(checks), tuple(_notes(source, record)))


def _claim(record: PrivacyRecord, found: dict[AccountantName, float]) -> Iterator[Check]:
    report, ledger = record.report, record.ledger
    versions = f" (claimed with dp_accounting {report.versions.get('dp_accounting', 'unknown')})"
    claims: dict[AccountantName, float | None] = {"rdp": report.epsilon_rdp, report.accountant: report.epsilon}
    for name, claimed in claims.items():
        if claimed is not None:
            agrees = _same(claimed, found[name])
            said = f"claimed {claimed:.6g}, recomputed {found[name]:.6g}"
            yield Check(f"epsilon ({name.upper()})", agrees, said + ("" if agrees else versions))
    if report.target_epsilon is not None:
        kept = found[report.accountant] <= report.target_epsilon * (1 + _TOLERANCE)
        yield Check("budget", kept, f"spent {found[report.accountant]:.6g} of {report.target_epsilon:g}")
    yield Check("steps", report.steps == ledger.steps, f"claimed {report.steps}, in the ledger {ledger.steps}")
    # The accountants here know no other; under another one the same events would cost more.
    known = all(getattr(report, name) == getattr(PrivacyReport, name) for name in ("unit", "adjacency", "sampling"))
    yield Check("unit, adjacency and sampling", known, f"{report.unit}; {report.adjacency}; {report.sampling}")
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
        yield Check("counts of rows", _same(counts, wanted), f"noise multiplier {counts} claimed, {wanted} follows")
    try:
        check_delta(report.delta, report.dataset_size)
    except ConfigurationError as error:
        yield Check("delta", False, error.found)
    else:
        yield Check("delta", True, f"{report.delta:.3g} is below 1/n = {1 / report.dataset_size:.3g}")
    q = report.expected_batch_size / report.dataset_size if report.dataset_size else math.nan
    steps = [event for event, _, label in ledger.entries if label == TRAINING_STEP]
    # The last, since earlier stages of one ledger may have had other batches.
    charged = getattr(steps[-1], "sampling_probability", q) if steps else q
    if steps and isinstance(steps[-1], dp.GaussianDpEvent):
        charged = 1.0
    agrees = _same(q, report.sampling_probability) and _same(q, charged)
    # Under a budget there is one stage, and all its steps are alike; otherwise the claim is about the last.
    judged = steps if report.target_epsilon is not None else steps[-1:]
    alike = all(event == step_event(report.noise_multiplier, report.sampling_probability) for event in judged)
    alike = alike and all(getattr(event, "sampling_probability", 1.0) > 0 for event in steps)
    said_noise = f"noise multiplier {report.noise_multiplier:g} " + ("is" if alike else "is not") + " that of the steps"
    yield Check("noise of the steps", alike, said_noise)
    said = f"expected batch {report.expected_batch_size:g} of n = {report.dataset_size}, charged with {charged:.6g}"
    yield Check("sampling probability", agrees, said)


def _promise(record: PrivacyRecord) -> Iterator[Check]:
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
        if not _same(promise.get(name, "absent"), value)
    ]
    differing += [
        f"{name}: {getattr(report, name)!r} in the report, {getattr(record.config, name)!r} in the config"
        for name in ("clipping_norm", "accountant", "target_epsilon")
        if not _same(getattr(report, name), getattr(record.config, name))
    ]
    yield Check("claim, config and ledger's promise", not differing, "; ".join(differing) or "they agree")


def _words(record: PrivacyRecord) -> Iterator[Check]:
    """What is said in words follows from the rest too, but only the version that wrote it knows how."""
    if not _is_of_this_version(record.report):
        return
    wanted = standard_caveats(withholds_logs=record.config.withhold_non_private_logs)
    missing = [caveat for caveat in wanted if caveat not in record.report.caveats]
    added = [str(caveat) for caveat in record.report.caveats if caveat not in wanted]
    said = " ".join([*(f"left out: {caveat}" for caveat in missing), *(f"added: {caveat}" for caveat in added)])
    agree = list(record.report.caveats) == list(wanted)
    yield Check("caveats", agree, "all that hold for this run, and no others" if agree else said or "in another order")
    agrees = sha256_of_text(privacy_section(record.report, record.ledger, record.config)) == record.card_sha256
    yield Check("words of the card", agrees, "they " + ("follow" if agrees else "do not follow") + " from the record")


def _is_of_this_version(report: PrivacyReport) -> bool:
    return report.versions.get("hf_dp") == library_versions()["hf_dp"]


def _files(source: Source, record: PrivacyRecord) -> Iterator[Check]:
    if not record.weights and not record.corpus:
        yield Check("weights", False, "the record names neither safetensors weights nor a corpus")
    for name, digest in sorted(record.files.items()):
        if name not in source.names:
            yield Check(name, False, "named in the record, but not there")
        else:
            found = sha256(source.path(name))
            said = f"SHA-256 {found[:12]}..." + ("" if found == digest else f", recorded {digest[:12]}...")
            yield Check(name, found == digest, said)
    # A folder of data is loaded with all that is in it.
    is_corpus = bool(record.corpus) and not record.weights
    loads = _is_no_dot_file if is_corpus else _would_be_loaded
    named = {*record.files, CARD_FILE, RECORD_FILE}
    strange = sorted(name for name in source.names if loads(name) and name not in named)
    what = "corpus" if is_corpus else "model"
    said = f"nothing that loads with the {what}"
    if strange:
        said = f"not named in the record: {', '.join(strange)} (of an earlier save, or put there since: take out)"
    yield Check("other files", not strange, said)


def _is_a_model(path: PurePosixPath) -> bool:
    return path.name == RECORD_FILE or (path.suffix in _LOADED - {".py"} and not path.name.startswith((".", "_")))


def _is_no_dot_file(name: str) -> bool:
    return not name.startswith(".")


def _would_be_loaded(name: str) -> bool:
    path = PurePosixPath(name)
    if path.suffix == ".py" and may_be_published(name):
        return True  # code of the model, in a folder of its own too
    if len(path.parts) > 1 or path.name in _LOCAL or path.name.startswith(("_", ".", "rng_state")):
        return False
    return path.suffix in _LOADED or path.name in _STEERING or path.name.endswith(".index.json")


def _card(source: Source, record: PrivacyRecord) -> Iterator[Check]:
    if CARD_FILE not in source.names:
        yield Check("card", False, f"there is no {CARD_FILE}")
        return
    text = source.path(CARD_FILE).read_text(encoding="utf-8", errors="replace")
    sections = re.findall(f"{BEGIN}.*?{END}", text, flags=re.DOTALL)
    agrees = len(sections) == 1 and sha256_of_text(sections[0]) == record.card_sha256
    yield Check("card, text", agrees, "the privacy section is " + ("as written" if agrees else "changed or missing"))
    try:
        claimed = ModelCard(text).data.get(METADATA_KEY)
        header = REGEX_YAML_BLOCK.search(text)
        if header and _has_a_name_twice(yaml.compose(header[2], yaml.SafeLoader)):
            claimed = None
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        claimed = None
    wanted = metadata(record, sha256(source.path(RECORD_FILE)))
    if not isinstance(claimed, dict) or set(claimed) != set(wanted):
        yield Check("card, metadata", False, f"{METADATA_KEY} is missing, or not whole")
        return
    differing = [
        f"{name} {claimed[name]!r}, not {value!r}" for name, value in wanted.items() if not _same(claimed[name], value)
    ]
    yield Check("card, metadata", not differing, "; ".join(differing) or "as in the record")


def _has_a_name_twice(node: Any) -> bool:
    # Of two values for one name some readers take the first, some the last, and the hub neither.
    if isinstance(node, yaml.SequenceNode):
        return any(map(_has_a_name_twice, node.value))
    if not isinstance(node, yaml.MappingNode):
        return False
    names = [name.value for name, _ in node.value]
    return len(set(map(str, names))) < len(names) or any(_has_a_name_twice(value) for _, value in node.value)


def _notes(source: Source, record: PrivacyRecord) -> Iterator[str]:
    report = record.report
    if not report.private:
        yield "This is not a private model: " + ("a seed was given." if report.reproducible else "epsilon is infinite.")
    if not _is_of_this_version(report):
        yield (
            f"The card and its caveats are in the words of hf_dp {report.versions.get('hf_dp')}; this is "
            f"{library_versions()['hf_dp']}, and compared them with the record's digest alone."
        )
    if record.corpus and not record.weights:
        yield (
            "Texts, and no model: that they were sampled from the model of this ledger, and that none was chosen by "
            "looking at the private data, is the word of whoever published them."
        )
    others = {str(path.parent) for path in map(PurePosixPath, source.names) if _is_a_model(path)}
    others -= {".", *(str(PurePosixPath(name).parent) for name in record.files)}
    if others:
        folders = ", ".join(sorted(others))
        yield f"Models in folders of their own are not checked here: {folders}. Verify each for itself."
    other = sorted(name for name in source.names if not may_be_published(name) and "/" not in name)
    local = [name for name in other if name not in (CARD_FILE, RECORD_FILE, ".gitattributes")]
    if local:
        yield f"For your own eyes, never published by hf_dp: {', '.join(local)}."


def _same(one: Any, two: Any) -> bool:
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, two)]
    if all(numbers):
        return math.isclose(one, two, rel_tol=_TOLERANCE)
    return type(one) is type(two) and bool(one == two)
