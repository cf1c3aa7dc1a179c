"""A model card beside its record: its metadata, read without tricks, and its privacy section."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from hf_dp.hub.card import BEGIN, END, METADATA_KEY, metadata, without_audit
from hf_dp.hub.charged import same
from hf_dp.hub.claim import Check, epsilon_tolerance, is_of_this_version
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord, sha256, sha256_of_text
from hf_dp.hub.source import Source
from hf_dp.hub.visible import why_hidden

_ADAPTER = "adapter_config.json"
# Bytes. Time grows with these; the longest cards on the hub are far below.
_LARGEST_CARD, _LARGEST_HEADER = 1 << 20, 1 << 18
_DEEPEST, _MOST_ALIASES = 50, 20
# Rounded up to four digits at least, of what other versions may compute otherwise.
_AS_PRINTED = 2e-3
# Of files in the card's own folder.
_PATTERN = re.compile(r"[\w*?-][\w.*?-]*", re.ASCII)
# YAML 1.1, which is read here, and YAML 1.2, which the hub reads, take other lines and numbers for the same: 060, 1:30.
_OTHER_LINES = re.compile("[\x85\u2028\u2029\ufeff]")
_SAME_IN_BOTH = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]*)?(e[+-]?[0-9]+)?|true|false", re.IGNORECASE)
# C is ten times as fast, where PyYAML was built with it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_card(source: Source, record: PrivacyRecord) -> Iterator[Check]:
    """The privacy section and the metadata of the card, against the record."""
    if CARD_FILE not in source.names:
        yield Check("card", False, f"there is no {CARD_FILE}")
        return
    path = source.path(CARD_FILE)
    if path.stat().st_size > _LARGEST_CARD:
        yield Check("card", False, f"{path.stat().st_size} bytes are no card to be read")
        return
    yield from check_text(path.read_bytes(), record, sha256(source.path(RECORD_FILE)), source.names)


def check_text(card: bytes, record: PrivacyRecord, record_sha256: str, names: Collection[str]) -> Iterator[Check]:
    """`check_card` of a card's bytes, among files of these `names`, beside a record of this digest."""
    text = "\n".join(re.split(r"\r\n|\r", card.decode("utf-8-sig", errors="replace")))
    header = REGEX_YAML_BLOCK.search(text)
    body = text[header.end() :] if header else text
    start, stop = body.find(BEGIN), body.find(END)
    once = text.count(BEGIN) == text.count(END) == 1 and 0 <= start < stop
    section = body[start : stop + len(END)] if once else ""
    unaudited = without_audit(section, record.audit)
    agrees = once and sha256_of_text(unaudited) == record.card_sha256
    yield Check("card, text", agrees, "the privacy section is " + ("as written" if agrees else "changed or missing"))
    if agrees:
        hidden = why_hidden(body, section)
        yield Check("card, visible", hidden is None, hidden or "the privacy section is read as it was written")
        if not is_of_this_version(record):
            yield _check_numbers(section, record)
    if record.is_corpus and (others := _loaded_besides(header[2] if header else "", record.corpus, names)):
        yield Check("card, data", False, f"its metadata has more loaded than the corpus: {', '.join(others)[:200]}")
    claimed = _metadata(header[2]) if header else None
    wanted = metadata(record, record_sha256)
    if claimed is None or set(claimed) != set(wanted):
        yield Check("card, metadata", False, f"{METADATA_KEY} is missing, or not whole")
        return
    near = functools.partial(same, tolerance=epsilon_tolerance(record.report))
    differing = [
        f"{name} {claimed[name]!r}, not {value!r}"
        for name, value in wanted.items()
        if not (near if name.startswith("epsilon") else same)(claimed[name], value)
    ]
    yield Check("card, metadata", not differing, "; ".join(differing) or "as in the record")


def base_beside(source: Source, record: PrivacyRecord) -> str | None:
    """What an adapter is loaded onto, where the card's metadata names other models and not that one; None otherwise."""
    if not {_ADAPTER, CARD_FILE} <= source.names or _ADAPTER not in record.files or not source.is_regular(_ADAPTER):
        return None
    config, card = source.path(_ADAPTER), source.path(CARD_FILE)
    if max(config.stat().st_size, card.stat().st_size) > _LARGEST_CARD:
        return None
    try:
        base = json.loads(config.read_bytes())["base_model_name_or_path"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    header = REGEX_YAML_BLOCK.search(card.read_text(encoding="utf-8-sig", errors="replace"))
    told = {value for names, value in _values(_names(header[2] if header else "")) if names == ("base_model",)}
    return base if isinstance(base, str) and told and base not in told else None


def _check_numbers(section: str, record: PrivacyRecord) -> Check:
    """The table of a section in the words of another version, which anybody may have written, against the record."""
    report, found = record.report, record.ledger.epsilons(record.report.delta)
    numbers: dict[str, float | None] = {f"epsilon, {name.upper()} accountant": found[name] for name in found}
    numbers |= {"delta": report.delta, "number of units": report.dataset_size, "steps": report.steps}
    rows = re.findall(r"^\| *([^|(]*[^|( ]) *(?:\([^|]*\))? *\| *([^| ,]*)", section, re.MULTILINE)
    wrong = [
        f"{name} {', '.join(told) or 'missing'}, not {wanted:.5g}"
        for name, wanted in numbers.items()
        if wanted is not None
        and not ((told := [value for row, value in rows if row == name]) and all(_is_near(one, wanted) for one in told))
    ]
    return Check("card, numbers", not wrong, "; ".join(wrong) or "those of the section's table are the record's")


def _is_near(told: str, wanted: float) -> bool:
    if isinstance(wanted, int):
        return told == str(wanted)
    try:
        return same(float(told), wanted, _AS_PRINTED)
    except ValueError:
        return False


def _metadata(header: str) -> dict[str, Any] | None:
    """What stands under our key; None where a name stands twice, a value stands for another, or there is no such."""
    found = [value for name, value in _names(header) if name.value == METADATA_KEY]
    if not found or not isinstance(found[0], yaml.MappingNode):
        return None
    if not all(isinstance(value, yaml.ScalarNode) and _is_plain(value) for _, value in found[0].value):
        return None
    try:
        loaded = yaml.SafeLoader("").construct_document(found[0])
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, yaml.YAMLError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _is_plain(value: Any) -> bool:
    is_text = value.tag == _LOADER.DEFAULT_SCALAR_TAG
    return len(value.value) < 500 and (is_text or _SAME_IN_BOTH.fullmatch(value.value) is not None)


def _names(header: str) -> list[tuple[Any, Any]]:
    """The names in the metadata and their values, not read yet; none where it is read in several ways."""
    if len(header) > _LARGEST_HEADER or _OTHER_LINES.search(header):
        return []
    try:
        around, aliases = list[bool](), 0
        for event in yaml.parse(header, _LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                around.append(event.anchor is not None)
            elif isinstance(event, yaml.CollectionEndEvent):
                around.pop()
            elif isinstance(event, yaml.AliasEvent):
                aliases += 1
                # An alias in what another stands for grows without bound.
                if any(around) or aliases > _MOST_ALIASES:
                    return []
            if len(around) > _DEEPEST:
                return []
        root = yaml.compose(header, _LOADER)
        return root.value if isinstance(root, yaml.MappingNode) and not _has_a_name_twice(root) else []
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, yaml.YAMLError):
        return []


def _loaded_besides(header: str, own: Collection[str], there: Collection[str]) -> list[str]:
    """What else than the corpus' `own` files `datasets` would load, `there` or elsewhere, by what the metadata says."""
    found = []
    for names, value in ((names, value) for names, value in _values(_names(header)) if {"configs", "<<"} & {*names}):
        is_a_split = names[-1] == "split" and re.fullmatch(r"\w+", value) is not None
        is_of_here = _PATTERN.fullmatch(value) is not None
        meant = {name for name in there if fnmatch.fnmatchcase(name, value)} if is_of_here else {value}
        is_strange = "data_files" in names and not (meant and meant <= {*own}) and not is_a_split
        if is_strange or "data_dir" in names or "<<" in names:
            found.append(value)
    return found


def _values(pairs: Iterable[tuple[Any, Any]], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """All values, each under the names above it."""
    for name, value in pairs:
        names = (*above, str(name.value))
        for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(one, yaml.MappingNode):
                yield from _values(one.value, names)
            elif isinstance(one, yaml.SequenceNode):
                yield from _values([(name, one)], above)
            else:
                yield names, str(one.value)


def _has_a_name_twice(node: Any) -> bool:
    # Of two values for one name some readers take the first, some the last, and the hub neither.
    if isinstance(node, yaml.SequenceNode):
        return any(map(_has_a_name_twice, node.value))
    if not isinstance(node, yaml.MappingNode):
        return False
    names = [name.value for name, _ in node.value]
    return len(set(map(str, names))) < len(names) or any(_has_a_name_twice(value) for _, value in node.value)
