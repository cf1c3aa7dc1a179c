"""A corpus of labelled texts: how many of which label, and how it is written to be shared."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.files import json_of
from hf_dp import PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.hub import CARD_FILE, RECORD_FILE, PrivacyRecord, write_card
from hf_dp.hub.card import privacy_section
from hf_dp.hub.record import sha256_of_text
from hf_dp.training.planned import trainings_before

_SHARED = (CARD_FILE, RECORD_FILE, "corpus.jsonl", "corpus.csv")


@dataclass(frozen=True)
class Texts:
    """Texts, and the number of each one's label."""

    texts: list[str]
    labels: list[int]


def label_names(path: str) -> list[str]:
    """The names in a JSON list.

    Raises:
        ConfigurationError: no list of different names.
    """
    names = json_of(path)
    if not isinstance(names, list) or not names or len({str(name) for name in names}) != len(names):
        raise ConfigurationError(
            f"labels_file {path!r} is no list of different names.",
            why="texts are learnt, and sampled, by the name of their label.",
            fix='write a JSON list such as ["complaint", "praise"].',
        )
    return [str(name) for name in names]


def shares(path: str | None, names: Sequence[str]) -> list[float]:
    """How often each label is to be sampled: uniformly, or as a public file says.

    Raises:
        ConfigurationError: a file with other labels, or with what is no share.
    """
    if path is None:
        return [1 / len(names)] * len(names)
    given = json_of(path)
    known = isinstance(given, dict) and set(given) <= set(names)
    values = [given.get(name, 0) for name in names] if known else []
    if not all(isinstance(v, (int, float)) and 0 <= v < math.inf for v in values) or not sum(values):
        raise ConfigurationError(
            f"label_frequencies {path!r} does not give shares of the labels.",
            why="the corpus is sampled label by label; counts of the private data would be one more release.",
            fix="give a JSON object of label names and numbers that are public knowledge, or leave it out for uniform.",
        )
    return [value / sum(values) for value in values]


def counts(wanted: Sequence[float], samples: int) -> list[int]:
    """Whole numbers in these shares that add up to `samples` (largest remainders)."""
    exact = [share * samples for share in wanted]
    found = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: found[i] - exact[i])
    for i in by_remainder[: samples - sum(found)]:
        found[i] += 1
    return found


def check_corpus_directory(directory: Path) -> None:
    """That nothing but an earlier corpus is in it.

    Raises:
        ConfigurationError: something is.
    """
    strange = sorted(path.name for path in directory.glob("*") if path.name not in _SHARED)
    if strange:
        raise ConfigurationError(
            f"{str(directory)!r} holds {', '.join(strange)}.",
            why="this folder is to be shared as it is, and must hold nothing but what is private by the guarantee.",
            fix="move these files away, or choose another output_dir.",
        )


def share(corpus: Texts, names: Sequence[str], directory: Path, model: Path, kind: str, how: str) -> None:
    """Writes what may be shared: the corpus, with the privacy record of the model that it was sampled from, and a card.

    Args:
        corpus: sampled from the model, and chosen by nothing else.
        names: of the labels.
        directory: for this, and for nothing else.
        model: the folder that the model was saved in.
        kind: "jsonl" or "csv".
        how: it was sampled, for the card.
    """
    directory.mkdir(parents=True, exist_ok=True)
    check_corpus_directory(directory)
    for name in _SHARED:
        (directory / name).unlink(missing_ok=True)
    file = directory / f"corpus.{kind}"
    pairs = [{"text": t, "label": names[label]} for t, label in zip(corpus.texts, corpus.labels, strict=True)]
    with file.open("w", newline="", encoding="utf-8") as out:
        if kind == "csv":
            writer = csv.DictWriter(out, ["text", "label"])
            writer.writeheader()
            writer.writerows(pairs)
        else:
            out.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    record = PrivacyRecord.from_json((model / RECORD_FILE).read_bytes())
    # A record of an earlier release is written in the words of this one.
    report = dataclasses.replace(record.report, adjacency=record.mechanism.unit.adjacency)
    card = sha256_of_text(privacy_section(report, record.ledger, record.config, saved=record.saved))
    shared = dataclasses.replace(record, report=report, files={}, card_sha256=card).with_files(directory, [file.name])
    (directory / RECORD_FILE).write_text(shared.to_json(), encoding="utf-8")
    (directory / CARD_FILE).write_text(
        f"""---
task_categories: [text-classification]
tags: [synthetic]
configs:
- config_name: default
  data_files: {file.name}
---

# Synthetic labelled texts

{len(pairs)} texts with {len(names)} labels, sampled from a language model that was fine-tuned on private texts with
their labels ({how}). What is sampled follows from that model's weights and chance alone: nothing was selected, dropped
or counted by looking at the private texts again. So what the section below says of the weights holds for this corpus
(post-processing). The texts are invented by a model: none of them is a fact.
""",
        encoding="utf-8",
    )
    write_card(directory)


def stays_private(privacy: PrivacyConfig) -> bool:
    """Whether a finite epsilon will hold of the model: of this training, and of those before it on the same people."""
    earlier = trainings_before(privacy)
    is_spoilt = any(one.reproducible or one.epsilon == math.inf for one in earlier)
    return privacy.seed is None and privacy.noise_multiplier != 0 and not is_spoilt


def refuse_choosing_by(encoder: str | None, privacy: PrivacyConfig) -> None:
    """Refuses an encoder that was trained on somebody's data to choose what is shared (`ConfigurationError`)."""
    if encoder is not None and not privacy.other_people and os.path.isfile(os.path.join(encoder, RECORD_FILE)):
        raise ConfigurationError(
            f"--draws above 1 with the encoder {encoder!r}, which a private training saved.",
            why="it chooses which texts are shared, and what it learnt from people in this data is not paid for here.",
            fix="give a public encoder, or --other_people true where nobody is in the data of both.",
        )
