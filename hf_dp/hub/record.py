"""`privacy.json`: the one file that says what a saved model promises, and what that follows from."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

import hf_dp.hub.version1 as version1
from hf_dp.accounting import Ledger, Mechanism, PrivacyReport
from hf_dp.audit.outcome import Audit
from hf_dp.config import PrivacyConfig
from hf_dp.config.plain import each_name_once
from hf_dp.config.ranges import LARGEST_NOISE, is_count, is_digest
from hf_dp.config.target import already_told
from hf_dp.errors import ConfigurationError, LedgerError, damaged

RECORD_FILE = "privacy.json"
CARD_FILE = "README.md"
FORMAT = "hf_dp privacy record"
VERSION = 2
# How hf_dp is had, on every card and in refusals. What is released to a package index is named here, and then only.
INSTALL = "with `pip install .` in a checkout of its source"
# As Transformers and PEFT name them; other tensors beside them are not the model.
_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors")
# Texts that were sampled from a private model, with its record.
_CORPORA = {"corpus.jsonl", "corpus.csv"}
# Far above any real record: a model of a thousand files has a tenth of it.
_LARGEST_RECORD, _MOST_FILES = 1 << 20, 2000  # bytes
# Of the records in one, which are indented there, beside all that is its own.
LARGEST_EARLIER = _LARGEST_RECORD // 2
# Of the largest noise multiplier, given as a whole number. Python takes the square of the digits to read more.
_LONGEST_NUMBER = len(f"{LARGEST_NOISE:.0f}")
# Lists and objects in one another; Python follows some hundreds.
DEEPEST = 100
_damaged = functools.partial(damaged, f"not a readable {RECORD_FILE}")
_FIELDS = {"format", "version", "report", "config", "mechanism", "ledger", "files", "card_sha256"}
# Of runs that had one: of an earlier training, which stands there itself, or several. The first records have no day.
_EARLIER, _AUDIT, _SAVED = "earlier", "audit", "saved"


@dataclass(frozen=True, kw_only=True)
class PrivacyRecord:
    """A claim, the ledger that it follows from, and the files that it is about.

    Attributes:
        report: the claim: epsilon, delta, n where it is public, unit, adjacency, sampling, caveats, versions.
        config: the promise of the run. Never with a seed: that one was used stands in `mechanism.reproducible`.
        mechanism: what the run did, in numbers.
        ledger: every release, as accounting events.
        files: SHA-256 (hexadecimal) of each file that belongs to the model, by its POSIX path beside the record.
        card_sha256: of the privacy section of the model card without what it says of an audit; see `hf_dp.hub.card`.
        version: of the file that it was read from; another one's words are not known here.
        earlier: the records of the trainings before on the same people that `config.after` names, as they were
            written, each with those before it.
        audit: what attacks on this training found; None if nobody says that there were any.
        saved: the day, in UTC, as "2026-11-23"; None of records of before it was written.
    """

    report: PrivacyReport
    config: PrivacyConfig
    mechanism: Mechanism
    ledger: Ledger
    files: Mapping[str, str]
    card_sha256: str
    version: int = VERSION
    earlier: tuple[str, ...] = ()
    audit: Audit | None = None
    saved: str | None = None

    @property
    def weights(self) -> list[str]:
        """The files that hold parameters."""
        names = {name: PurePosixPath(name).name for name in self.files}
        return sorted(n for n, last in names.items() if any(fnmatch.fnmatch(last, pattern) for pattern in _WEIGHTS))

    @property
    def corpus(self) -> list[str]:
        """The files that hold texts sampled from the model, where these were saved and not the model."""
        return sorted(_CORPORA.intersection(self.files))

    @property
    def is_corpus(self) -> bool:
        """It is about texts, which are loaded with all that lies beside them."""
        return bool(self.corpus)

    def to_json(self) -> str:
        """Strict JSON of this version; `from_json` is the inverse, but for the seed."""
        config = {name: "inf" if value == math.inf else value for name, value in self.config.published().items()}
        before = list(map(json.loads, self.earlier))
        values = {
            "format": FORMAT,
            "version": VERSION,
            "report": self.report.to_dict(),
            "config": config,
            "mechanism": self.mechanism.to_dict(),
            "ledger": self.ledger.to_dict(),
            "files": dict(sorted(self.files.items())),
            "card_sha256": self.card_sha256,
            **({_EARLIER: before if len(before) > 1 else before[0]} if before else {}),
            **({} if self.audit is None else {_AUDIT: self.audit.to_dict()}),
            **({} if self.saved is None else {_SAVED: self.saved}),
        }
        return as_written(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> PrivacyRecord:
        """The record that `to_json` wrote, in this version or an earlier one.

        Raises:
            LedgerError: anything else: another version, a missing or unknown field, an unknown event, a number that
                is none.
        """
        if len(text) > _LARGEST_RECORD:
            raise _damaged(f"it has {len(text)} bytes, and no record has more than {_LARGEST_RECORD}")
        try:
            values = json.loads(
                text, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole,
                object_pairs_hook=each_name_once,
            )  # fmt: skip
        except (ValueError, RecursionError) as error:
            raise _damaged(f"it is not strict JSON ({error})") from error
        if is_deep(values):
            raise _damaged(f"it is nested deeper than {DEEPEST}")
        if not _is_printable(values):
            raise _damaged("it has control characters, or half a character, in a text")
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise _damaged(f"it does not begin with the format {FORMAT!r}")
        version = values.get("version")
        if not is_count(version) or version not in (version1.VERSION, VERSION):
            raise LedgerError(
                f"this {RECORD_FILE} has version {version!r}; this release reads versions up to {VERSION}.",
                why="fields that are not known here could change what is promised; guessing at them proves nothing.",
                fix=f"install a newer hf_dp {INSTALL}.",
            )
        before = values.pop(_EARLIER, [])
        earlier = tuple(map(as_written, before if isinstance(before, list) else [before]))
        audit = Audit.from_dict(values.pop(_AUDIT)) if _AUDIT in values else None
        if _SAVED in values and not _is_day(values[_SAVED]):
            raise _damaged(f"saved is {str(values[_SAVED])[:100]!r}, and no day such as '2026-11-23'")
        saved = values.pop(_SAVED, None)
        fields = _FIELDS if version == VERSION else _FIELDS - {"mechanism"}
        if set(values) != fields:
            raise _damaged(f"missing or unknown fields {sorted(set(values) ^ fields)}")
        if not isinstance(values["config"], dict) or "seed" in values["config"]:
            raise _damaged("config is not an object, or it holds a seed")
        try:
            with already_told():
                config = PrivacyConfig.from_json(json.dumps(values["config"]))
        except (ConfigurationError, TypeError) as error:
            raise _damaged(f"config is not a promise: {error}") from error
        files = values["files"]
        if not isinstance(files, dict) or not all(is_digest(digest) for digest in files.values()):
            raise _damaged("files does not give a SHA-256 for each name")
        if len(files) > _MOST_FILES:
            raise _damaged(f"it names {len(files)} files, and no model has more than {_MOST_FILES}")
        if not is_digest(values["card_sha256"]):
            raise _damaged(f"card_sha256 is {str(values['card_sha256'])[:100]!r}")
        try:
            ledger = Ledger.from_dict(values["ledger"])
            if version == version1.VERSION:
                report, mechanism = version1.read(values["report"], config, ledger)
            else:
                report = PrivacyReport.from_dict(values["report"])
                mechanism = Mechanism.from_dict(values["mechanism"])
        except (ArithmeticError, RecursionError) as error:
            raise _damaged(f"it holds what cannot be computed with ({error})") from error
        card = values["card_sha256"]
        return cls(
            report=report, config=config, mechanism=mechanism, ledger=ledger, files=files, card_sha256=card,
            version=version, earlier=earlier, audit=audit, saved=saved,
        )  # fmt: skip

    def with_files(self, directory: str | os.PathLike[str], names: list[str]) -> PrivacyRecord:
        """This record, about these files below `directory` as they are now."""
        return dataclasses.replace(self, files={name: sha256(Path(directory) / name) for name in names})


def as_written(values: Any) -> str:
    """The text of a record, given its values."""
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def sha256_of_record(text: str | bytes) -> str:
    """Of a record as it is written, in hexadecimal, however its JSON is set; an audit that was added makes no other."""
    values = json.loads(text)
    if isinstance(values, dict):
        values.pop(_AUDIT, None)
    return hashlib.sha256(as_written(values).encode()).hexdigest()


def sha256(path: str | os.PathLike[str]) -> str:
    """Of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_text(text: str) -> str:
    """Of UTF-8 text, in hexadecimal; line ends and blanks around it do not count."""
    # Markdown knows these line ends alone; splitlines() knows more.
    lines = (line.rstrip(" \t") for line in re.split(r"\r\n|\r|\n", text.strip(" \t\r\n")))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def is_deep(values: Any) -> bool:
    """Whether JSON values are nested deeper than `DEEPEST`."""
    level = [values]
    for _ in range(DEEPEST):
        level = [
            part
            for value in level
            if isinstance(value, (dict, list))
            for part in (value.values() if isinstance(value, dict) else value)
        ]
    return any(isinstance(value, (dict, list)) for value in level)


def _is_printable(value: Any) -> bool:
    """Of all texts in it: they are printed, and stand on cards."""
    if isinstance(value, dict):
        return all(_is_printable(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return all(map(_is_printable, value))
    return not isinstance(value, str) or value.isprintable()


def _is_day(value: Any) -> bool:
    try:
        return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits[:100]} is larger than any number")
    return number


def _whole(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)
