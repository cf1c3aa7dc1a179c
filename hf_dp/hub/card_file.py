"""The model card as a file: what a person wrote in it stays, and the privacy section goes where it is seen."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from markdown_it import MarkdownIt

from hf_dp.hub.about import BY_TRAINER, about, contradicted, taken_out, template, without_padding, without_results
from hf_dp.hub.card import BEGIN, END, METADATA_KEY, TAGS, metadata, privacy_section, without_audit
from hf_dp.hub.claim import is_of_this_version
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord, sha256, sha256_of_text
from hf_dp.hub.visible import why_hidden

logger = logging.getLogger(__name__)

_ADAPTER = "adapter_config.json"
# Of a card without any, which ModelCard would warn of: PEFT's and TRL's are such.
_NO_METADATA = "---\n{}\n---\n"
# In cards that Trainer drafts.
_TO_BE_FILLED = "More information needed"


def write_card(
    directory: str | os.PathLike[str],
    name: str | None = None,
    record: PrivacyRecord | None = None,
    base_model: str | None = None,
) -> None:
    """Put the privacy section and metadata into the model card of a saved model; make a card where there is none.

    Before the section stands what the card says of the model itself (`about`). What else a person wrote stays; what
    templates leave to be filled in goes, and so do results that Trainer drafted of a training before. A card that
    cannot be read is kept beside the new one. Writing twice changes nothing.

    Args:
        directory: with `privacy.json`.
        name: the heading of a new card; by default the directory's name.
        record: what `privacy.json` holds, with epsilons that are computed already; by default it is read.
        base_model: what the model was made from, for a card that does not say; a place on this machine is not named.

    Raises:
        LedgerError: a `privacy.json` that cannot be read.
    """
    directory = Path(directory)
    path = directory / CARD_FILE
    record = record or PrivacyRecord.from_json((directory / RECORD_FILE).read_bytes())
    set_unreadable_aside(directory)
    card = _read(path.read_bytes()) if path.exists() else None
    title = name or directory.absolute().name
    if card is None:
        new = ModelCardData(library_name="transformers").to_yaml()
        card = ModelCard(f"---\n{new}\n---\n\n# {title}\n")
    section = privacy_section(record.report, record.ledger, record.config, record.audit, record.saved)
    if not is_of_this_version(record):
        unaudited = without_audit(kept := _section(card.text), record.audit)
        if sha256_of_text(unaudited) == record.card_sha256:
            section = kept  # in the words that its record has the digest of
    data = card.data
    if (bare := without_results(card.text)) != card.text:
        # Of a training without privacy that was saved here before: of the data without noise, and of another model.
        card.text = bare
        data["eval_results"] = None
    tags = _other_tags(data)
    if base_model and not data.get("base_model"):
        data["base_model"] = base_model
    if not _is_on_the_hub(data.get("base_model")):
        # A path on this machine is no model on the hub, which refuses such metadata.
        data.pop("base_model", None)
        tags = [tag for tag in tags if not tag.startswith("base_model:")]
    if data.get("library_name") == "peft" and _ADAPTER not in record.files:
        # Of an adapter that was saved here before it was merged.
        data["library_name"] = "transformers"
        tags = [tag for tag in tags if tag != "lora" and not tag.startswith("base_model:adapter:")]
    card.text = _with_section(card.text, section, title, data)
    data["tags"] = [*tags, *(TAGS if record.report.private else ()), "hf_dp"]
    data[METADATA_KEY] = metadata(record, sha256(directory / RECORD_FILE))
    aside = path.with_name(f"_{CARD_FILE}")
    card.save(aside)
    os.replace(aside, path)


def set_unreadable_aside(directory: Path) -> None:
    """Renames a card that cannot be read as one to a name that is never published, and says so."""
    path = directory / CARD_FILE
    if not path.is_file() or _read(path.read_bytes()) is not None:
        return
    names = itertools.chain(["README.old.md"], (f"README.old-{number}.md" for number in itertools.count(2)))
    kept = next(place for name in names if not os.path.lexists(place := directory / name))
    os.replace(path, kept)
    _warn(
        "%s in %r cannot be read as a model card (UTF-8, with metadata in YAML): it is kept as %s, which is not "
        "published.", CARD_FILE, str(directory), kept.name,
    )  # fmt: skip


def with_what_was_there(new: str, old: bytes) -> str:
    """A card that was drafted anew, with all that a person or a recipe wrote into the one before it.

    That is what neither the draft nor the hub's template has: sections, metadata, and the introduction, once Trainer's
    mark of its own is taken out of it. Of a section that the draft has, its own text counts, where it is one.
    """
    before, after = _read(old), _read(new.encode())
    if before is None or after is None:
        return new
    before.text, table = taken_out(before.text)
    drafted = template()[0] | {line.strip() for line in after.text.split("\n")}

    def is_own(part: str) -> bool:
        return any(line.strip() not in drafted for line in part.split("\n") if not line.startswith("# "))

    sections = _sections(after.text)
    for heading, part in _sections(_without_sections(before.text)).items():
        now = sections.get(heading, "")
        is_drafted = BY_TRAINER in part if heading == "" else now and not now.rstrip().endswith(f"\n{_TO_BE_FILLED}")
        if is_own(part) and not is_drafted:
            sections[heading] = part
    after.text = "\n\n".join(part.strip() for part in [*sections.values(), table]) + "\n"
    data, there = after.data, cast(Any, before.data)
    for name, value in there.to_dict().items():
        if name not in (METADATA_KEY, "tags", "model-index") and data.get(name) is None:
            data[name] = value
    data["tags"] = list(dict.fromkeys([*_other_tags(data), *_other_tags(there)])) or None
    return str(after)


def _sections(text: str) -> dict[str, str]:
    """What stands under each heading of the second level, with it; the introduction under ""."""
    lines = text.split("\n")
    tokens = MarkdownIt("commonmark").parse(text)
    starts = [token.map[0] for token in tokens if token.map and (token.tag, token.level) == ("h2", 0)]
    found = {"": "\n".join(lines[: starts[0]] if starts else lines)}
    for start, stop in itertools.pairwise([*starts, len(lines)]):
        heading = lines[start].strip()
        found[heading] = "\n".join([*([found[heading]] if heading in found else []), *lines[start:stop]])
    return found


def without_claim(card: bytes) -> bytes | None:
    """A card as it was before `write_card`, but for an empty section where the next one goes; other cards unchanged.

    None if it cannot be read.
    """
    found = _read(card)
    if found is None or not any(mark.encode() in card for mark in (BEGIN, METADATA_KEY)):
        return None if found is None else card
    if BEGIN in found.text:
        found.text = _in_its_place(found.text, f"{BEGIN}\n{END}")
    found.data.pop(METADATA_KEY, None)
    found.data["tags"] = _other_tags(found.data) or None
    return str(found).encode()


def _warn(message: str, *about: object) -> None:
    # Here, as who reads a card may do without torch.
    import hf_dp.ranks as ranks

    ranks.warn(logger, message, *about)


def _read(content: bytes) -> ModelCard | None:
    try:
        text = content.decode("utf-8-sig")
        header = REGEX_YAML_BLOCK.search(text)
        card = ModelCard(text if header else f"{_NO_METADATA}{text}")
        tags = (yaml.safe_load(header[2]) or {}).get("tags") if header else None
        if isinstance(tags, str):  # ModelCard takes its letters for tags
            card.data["tags"] = [tags]
        str(card).encode()
    except Exception:  # noqa: BLE001 - each kind of metadata has errors of its own, and none may cost a trained model
        return None
    return card


def _other_tags(data: Any) -> list[str]:
    return [str(tag) for tag in data.get("tags") or [] if tag not in (*TAGS, "hf_dp")]


def _section(text: str) -> str:
    """The one that is there, with its markers; empty where there is none, or more than one."""
    start, stop = text.find(BEGIN), text.find(END)
    return text[start : stop + len(END)] if text.count(BEGIN) == text.count(END) == 1 and start < stop else ""


def _with_section(text: str, section: str, title: str, data: Any) -> str:
    # Whoever moved the section into the table has it once.
    table = _without_sections(about(text, data))
    if wrong := contradicted(table, data):
        _warn(
            "The table in %s says otherwise than its metadata (%s): what stands in the table was kept. Make them the "
            "same.", CARD_FILE, "; ".join(wrong),
        )  # fmt: skip
    text, _ = taken_out(text)
    bare = _without_sections(text)
    text = text if (filled := without_padding(bare, title)) == bare else filled
    both = f"{table}\n\n{section}" if table else section
    placed = _in_its_place(text, both)
    reason = why_hidden(placed, section)
    if reason is None:
        return placed
    # What is open around the section further down is not open at the top.
    on_top = f"\n\n{both}\n\n{_without_sections(text).lstrip()}"
    if why_hidden(on_top, section) is None:
        return on_top
    _warn(
        "Readers of this %s might not see its privacy section (%s), and `hf-dp verify` will say so: change the card, "
        "and save again.", CARD_FILE, reason,
    )  # fmt: skip
    return placed


def _in_its_place(text: str, section: str) -> str:
    start, stop = text.find(BEGIN), text.find(END)
    if text.count(BEGIN) == text.count(END) == 1 and start < stop:
        return f"{text[:start].rstrip()}\n\n{section}{text[stop + len(END) :]}"
    text = _without_sections(text)
    # After the introduction, where it is seen: "##" in code is no heading.
    tokens = MarkdownIt("commonmark").parse(text)
    below = ("h2", "h3", "h4", "h5", "h6")
    headings = [token.map[0] for token in tokens if token.map and token.tag in below and not token.level]
    lines = text.split("\n")
    at = headings[0] if headings else len(lines)
    before, rest = "\n".join(lines[:at]), "\n".join(lines[at:])
    return f"{before.rstrip()}\n\n{section}\n" + (f"\n{rest}" if rest else "")


def _without_sections(text: str) -> str:
    # Of several the others would be old, and marks that are crossed mark nothing.
    first, *parts = text.split(BEGIN)
    return (first + "".join(part.partition(END)[2] if END in part else part for part in parts)).replace(END, "")


def _is_on_the_hub(base_model: Any) -> bool:
    names = base_model if isinstance(base_model, list) else [base_model]
    try:
        for name in names:
            validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(names) and not any(not name or os.path.exists(name) for name in names)
