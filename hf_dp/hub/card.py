"""The privacy section of a model card, and its metadata: what the record says, in words."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import dp_accounting as dp
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from markdown_it import MarkdownIt

from hf_dp.accounting import NO_NOISE, REPRODUCIBLE, Ledger, PrivacyReport
from hf_dp.config import AccountantName, PrivacyConfig
from hf_dp.hub.record import CARD_FILE, INSTALL, RECORD_FILE, PrivacyRecord, sha256

BEGIN, END = "<!-- hf_dp privacy begins -->", "<!-- hf_dp privacy ends -->"
METADATA_KEY = "differential_privacy"
TAGS = ("differential-privacy", "dp-sgd")
_BASE_MODEL = "The data that the base model was trained on before this run is not covered."
_LARGEST_EXPONENT = 700  # of a float
_EVALUATION = "Evaluation data, and metrics computed from it, are not covered."
_RE_ATTENTION = (
    "**Re-Attention.** The model was trained with its attention corrected for the noise in keys. Loaded without hf_dp "
    'it is the plain model; `hf_dp.load_re_attention(model, "OWNER/NAME")` puts the correction back on it.'
)
_PEOPLE = "A person behind k training examples is protected k times less (group privacy)."


def epsilons(report: PrivacyReport, ledger: Ledger) -> dict[AccountantName, float]:
    """Epsilon of everything in the ledger at the report's delta, by each accountant, in nats."""
    names: tuple[AccountantName, ...] = ("pld", "rdp")
    return {name: ledger.epsilon(report.delta, name) for name in names}


def privacy_section(report: PrivacyReport, ledger: Ledger, config: PrivacyConfig) -> str:
    """The section as Markdown, between its two markers."""
    found = epsilons(report, ledger)
    lines = [BEGIN, "## Privacy", "", *_promise(report, found), "", "| quantity | value |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in _rows(report, found).items()]
    lines += ["", "Everything that was released of the training data:", "", "| release | times | mechanism |"]
    lines += ["| --- | --- | --- |"]
    lines += [f"| {label} | {count} | {in_words(event)} |" for event, count, label in ledger.entries]
    lines += ["", "**What is not covered.**", ""]
    lines += [f"- {caveat}" for caveat in (*report.caveats, _BASE_MODEL, _EVALUATION, _PEOPLE)]
    lines += ["", _RE_ATTENTION] if config.re_attention is not None else []
    lines += [
        "",
        f"**How to verify.** Install hf_dp, version {report.versions.get('hf_dp', 'unknown')}, {INSTALL}. "
        "Then `hf-dp verify OWNER/NAME`, with the name of this repository, "
        f"computes epsilon again from the ledger in `{RECORD_FILE}`, and compares it with this card and the files with "
        "their digests. That the ledger is a true record of the training is the word of whoever published it.",
        END,
    ]
    return "\n".join(lines)


def _promise(report: PrivacyReport, found: dict[AccountantName, float]) -> list[str]:
    if not report.private:
        reason = NO_NOISE if not math.isfinite(report.epsilon) else REPRODUCIBLE
        return [f"**This model is not private.** {reason} The numbers below describe the run; they protect nobody."]
    pld = found["pld"]
    likelier = f"exp(epsilon) = {math.exp(pld):,.3g}" if pld < _LARGEST_EXPONENT else "exp(epsilon)"
    return [
        "Fine-tuned with differential privacy (DP-SGD) by hf_dp.",
        "",
        f'**What is protected:** {report.unit}, in the sense of "{report.adjacency}". Had any single one been absent '
        "from the training data (or present), every conclusion that anyone can draw from these weights, or from what "
        f"is made of them alone, would have been at most {likelier} times as likely or as unlikely, but for a "
        f"probability of {report.delta:.3g}.",
    ]


def _rows(report: PrivacyReport, found: dict[AccountantName, float]) -> dict[str, str]:
    budget = "" if report.target_epsilon is None else f" (budget {report.target_epsilon:g})"
    return {
        "epsilon, PLD accountant (tight)": f"{found['pld']:.5g}{budget}",
        "epsilon, RDP accountant (looser)": f"{found['rdp']:.5g}",
        "delta": f"{report.delta:.4g}",
        "privacy unit": report.unit,
        "neighbouring datasets": report.adjacency,
        "number of units": f"{report.dataset_size}",
        "sampling": f"{report.sampling}: each unit with probability {report.sampling_probability:.4g} in each step, "
        f"{report.expected_batch_size:g} on average",
        "steps": f"{report.steps}",
        "noise multiplier": f"{report.noise_multiplier:.4g}",
        "clipping norm": f"{report.clipping_norm:g}",
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }


def in_words(event: dp.DpEvent) -> str:
    """One release, for a reader of the card."""
    match event:
        case dp.PoissonSampledDpEvent(sampling_probability=q, event=inner):
            return f"{in_words(inner)}, on a Poisson sample with probability {q:.4g}"
        case dp.GaussianDpEvent(noise_multiplier=noise):
            return f"Gaussian noise, {noise:.4g} times the sensitivity"
        case dp.NonPrivateDpEvent():
            return "no noise"
        case dp.ComposedDpEvent(events=parts):
            return " and ".join(map(in_words, parts))
        case dp.SelfComposedDpEvent(event=inner, count=count):
            return f"{count} times: {in_words(inner)}"
    return str(event)


def metadata(record: PrivacyRecord, record_sha256: str) -> dict[str, Any]:
    """What stands under `differential_privacy` in the card's YAML."""
    report = record.report
    found = {f"epsilon_{name}": value for name, value in epsilons(report, record.ledger).items()}
    return {
        **{name: "inf" if value == math.inf else value for name, value in found.items()},
        "delta": report.delta,
        "private": report.private,
        "unit": report.unit,
        "adjacency": report.adjacency,
        "sampling": report.sampling,
        "dataset_size": report.dataset_size,
        "record": RECORD_FILE,
        "record_sha256": record_sha256,
    }


def write_card(directory: str | os.PathLike[str], name: str | None = None, record: PrivacyRecord | None = None) -> None:
    """Put the privacy section and metadata into the model card of a saved model; make a card where there is none.

    What else is in the card stays. Writing twice changes nothing.

    Args:
        directory: with `privacy.json`.
        name: the heading of a new card; by default the directory's name.
        record: what `privacy.json` holds, with epsilons that are computed already; by default it is read.

    Raises:
        LedgerError: a `privacy.json` that cannot be read.
    """
    directory = Path(directory)
    path = directory / CARD_FILE
    record = record or PrivacyRecord.from_json((directory / RECORD_FILE).read_bytes())
    if path.exists():
        card = ModelCard.load(path)
    else:
        data = ModelCardData(library_name="transformers")
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {name or directory.absolute().name}\n")
    card.text = _with_section(card.text, privacy_section(record.report, record.ledger, record.config))
    data = card.data
    tags = _other_tags(data)
    if not _is_on_the_hub(data.get("base_model")):
        # A path on this machine is no model on the hub, which refuses such metadata.
        data.pop("base_model", None)
        tags = [tag for tag in tags if not tag.startswith("base_model:")]
    data["tags"] = [*tags, *(TAGS if record.report.private else ()), "hf_dp"]
    data[METADATA_KEY] = metadata(record, sha256(directory / RECORD_FILE))
    aside = path.with_name(f"_{CARD_FILE}")
    card.save(aside)
    os.replace(aside, path)


def without_claim(card: bytes) -> bytes:
    """A card as it was before `write_card`, but for an empty section where the next one goes; other cards unchanged."""
    if not any(mark.encode() in card for mark in (BEGIN, METADATA_KEY)):
        return card
    found = ModelCard(card.decode("utf-8"))
    if BEGIN in found.text:
        found.text = _with_section(found.text, f"{BEGIN}\n{END}")
    found.data.pop(METADATA_KEY, None)
    found.data["tags"] = _other_tags(found.data) or None
    return str(found).encode()


def _other_tags(data: Any) -> list[str]:
    return [tag for tag in data.get("tags") or [] if tag not in (*TAGS, "hf_dp")]


def _with_section(text: str, section: str) -> str:
    start, stop = text.find(BEGIN), text.find(END)
    if text.count(BEGIN) == text.count(END) == 1 and start < stop:
        return text[:start] + section + text[stop + len(END) :]
    # Of several the others would be old, and marks that are crossed mark nothing.
    first, *parts = text.split(BEGIN)
    text = (first + "".join(part.partition(END)[2] if END in part else part for part in parts)).replace(END, "")
    # After the introduction, where it is seen: "##" in code is no heading.
    tokens = MarkdownIt("commonmark").parse(text)
    headings = [token.map[0] for token in tokens if token.map and (token.tag, token.level) == ("h2", 0)]
    lines = text.split("\n")
    at = headings[0] if headings else len(lines)
    before, rest = "\n".join(lines[:at]), "\n".join(lines[at:])
    return f"{before.rstrip()}\n\n{section}\n" + (f"\n{rest}" if rest else "")


def _is_on_the_hub(base_model: str | list[str] | None) -> bool:
    names = [base_model] if isinstance(base_model, str) else base_model or []
    try:
        for name in names:
            validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(names) and not any(not name or os.path.exists(name) for name in names)
