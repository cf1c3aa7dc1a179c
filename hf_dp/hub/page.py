"""A model card as its readers see it: its metadata, read without tricks, and which of its text is visible."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from html.parser import HTMLParser
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from markdown_it import MarkdownIt

from hf_dp.hub.card import BEGIN, END, METADATA_KEY, metadata, without_audit
from hf_dp.hub.charged import same
from hf_dp.hub.claim import Check, epsilon_tolerance
from hf_dp.hub.record import CARD_FILE, RECORD_FILE, PrivacyRecord, sha256, sha256_of_text
from hf_dp.hub.source import Source

# Bytes. Time grows with these, for some texts with their square; the longest cards on the hub are far below.
_LARGEST_CARD, _LARGEST_HEADER, _LARGEST_TEXT = 1 << 20, 1 << 18, 1 << 16
_DEEPEST = 50
# C is ten times as fast, where PyYAML was built with it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
# They act on others than those inside them, or browsers read what is inside them otherwise than as tags.
_STYLING = {
    "style", "link", "script", "base", "meta", "html", "head", "body", "frameset", "dialog", "template", "select",
    "textarea", "title", "xmp", "iframe", "noembed", "noframes", "noscript", "plaintext", "svg", "math",
}  # fmt: skip
# Styles that lay nothing over other elements.
_STYLES = {
    "text-align", "vertical-align", "align-items", "justify-content", "gap", "display", "color", "font-size",
    "font-weight", "font-style", "width", "max-width", "min-width", "background", "background-color", "border",
    "border-radius", "padding", "margin", "margin-top", "margin-bottom", "margin-left", "margin-right",
}  # fmt: skip
_MOVING_STYLE = re.compile(r"-[\d.]|[(\\/]")
_MOVING_CLASS = re.compile(r"fixed|absolute|sticky|inset|overlay|translate|scale|(^|[\s:!])-")
# What stands between these the hub makes a formula of, before it reads Markdown: whatever lies there, code too.
_FORMULAS = (("$$", "$$"), (r"\\(", r"\\)"))
# In formulas these show something elsewhere, or what they are is said elsewhere. No length begins behind a letter or a
# figure that is of no command: GPT-2 in.
_MOVING_FORMULA = re.compile(
    r"\\(raisebox|rule|smash|\w*def|\w*let|\w*command|html\w+|includegraphics)"
    r"|(\\[A-Za-z]+|(?<![A-Za-z0-9]))-\s*[\d.]+\s*(em|ex|px|pt|mu|cm|mm|in|bp|pc|dd|cc|nd|nc|sp)"
)


def check_card(source: Source, record: PrivacyRecord) -> Iterator[Check]:
    """The privacy section and the metadata of the card, against the record."""
    if CARD_FILE not in source.names:
        yield Check("card", False, f"there is no {CARD_FILE}")
        return
    path = source.path(CARD_FILE)
    if path.stat().st_size > _LARGEST_CARD:
        yield Check("card", False, f"{path.stat().st_size} bytes are no card to be read")
        return
    yield from check_text(path.read_bytes(), record, sha256(source.path(RECORD_FILE)))


def check_text(card: bytes, record: PrivacyRecord, record_sha256: str) -> Iterator[Check]:
    """`check_card` of a card's bytes, beside a record of this digest."""
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
    if record.is_corpus and (others := _loaded_besides(header[2] if header else "", record.corpus)):
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


def _metadata(header: str) -> dict[str, Any] | None:
    """What stands under our key; None where a name stands twice, a value stands for another, or there is no such."""
    found = [value for name, value in _names(header) if name.value == METADATA_KEY]
    if not found or not isinstance(found[0], yaml.MappingNode):
        return None
    if not all(isinstance(value, yaml.ScalarNode) and len(value.value) < 500 for _, value in found[0].value):
        return None
    try:
        loaded = yaml.SafeLoader("").construct_document(found[0])
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, yaml.YAMLError):
        return None
    return loaded if isinstance(loaded, dict) else None


def _names(header: str) -> list[tuple[Any, Any]]:
    """The names in the metadata and their values, not read yet; none where it is read in several ways."""
    if len(header) > _LARGEST_HEADER:
        return []
    try:
        depth = 0
        for event in yaml.parse(header, _LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            # An alias in an alias grows without bound, and merges (<<) what is written elsewhere.
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                return []
        root = yaml.compose(header, _LOADER)
        return root.value if isinstance(root, yaml.MappingNode) and not _has_a_name_twice(root) else []
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, yaml.YAMLError):
        return []


def _loaded_besides(header: str, own: Collection[str]) -> list[str]:
    """What else `datasets` would load, wherever it lies, by what the metadata says of the data."""
    found = []
    for names, value in ((names, value) for names, value in _values(_names(header)) if {"configs", "<<"} & {*names}):
        is_a_split = names[-1] == "split" and re.fullmatch(r"\w+", value) is not None
        is_strange = "data_files" in names and value not in own and not is_a_split
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


def why_hidden(body: str, section: str) -> str | None:
    """Why a reader of the card's Markdown would not see its privacy section as it was written; None if they would."""
    if len(body.encode()) > _LARGEST_TEXT:
        return f"the card is too long to tell what of it is seen (more than {_LARGEST_TEXT} bytes)"
    if (formula := _formula_over(body, section)) is not None:
        return formula
    here, alone = _seen(body), _seen(section)
    if here.around is None:
        return "it lies in code, or in a comment"
    if here.around:
        return f"it lies inside <{'> <'.join(here.around)}>: close these before it"
    if here.styling:
        return f"{here.styling} could hide it"
    return None if here.inside == alone.inside else "it is shown otherwise than it was written"


def _formula_over(body: str, section: str) -> str | None:
    """What formulas could do to the section, in words; None where they do nothing."""
    before, _, behind = body.partition(section)
    for begin, end in _FORMULAS:
        if begin in before and end in behind:
            return f"a formula ({begin}) that begins before it could end behind it: have them on one side of it alone"
    # Which of them end where others begin is not asked: from the first to the last all could be one.
    within = [
        body[body.find(begin) + len(begin) : max(0, body.rfind(end))] for begin, end in _FORMULAS if begin in body
    ]
    moving = next(filter(None, map(_MOVING_FORMULA.search, within)), None)
    return None if moving is None else f"a formula with {moving[0]} could lie over it"


def _seen(text: str) -> _Page:
    rendered = MarkdownIt("commonmark").enable("table").render(text)
    page = _Page(rendered)
    page.feed(rendered)
    page.close()
    return page


def _could_lie_over_others(tag: str, attribute: str, value: str) -> bool:
    if attribute == "class":
        return _MOVING_CLASS.search(value) is not None
    names = {style.partition(":")[0].strip().casefold() for style in value.split(";")} - {""}
    known = _STYLES | {"height"} if tag == "img" else _STYLES
    return attribute == "style" and (not names <= known or _MOVING_STYLE.search(value) is not None)


class _Page(HTMLParser):
    """The rendered card.

    Attributes:
        around: names of the elements that are open where the section begins; None if nothing begins there.
        inside: what is between the section's marks.
        styling: what acts on others than those inside it, or is read otherwise by browsers than here, if there is any.
    """

    def __init__(self, rendered: str) -> None:
        super().__init__(convert_charrefs=True)
        self._lines = rendered.split("\n")
        self.around: list[str] | None = None
        self.inside: list[tuple[object, ...]] = []
        self.styling: str | None = None
        self._open: list[str] = []
        self._is_inside = False

    def _note(self, *what: object) -> None:
        if self._is_inside:
            self.inside.append(what)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note("start", tag, *attrs)
        if tag in _STYLING:
            self.styling = f"<{tag}>"
        elif any(_could_lie_over_others(tag, name, value or "") for name, value in attrs):
            self.styling = f"the style or class of <{tag}>"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Browsers take no notice of the slash in <div/>.
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self._note("end", tag)
        # Where tags cross, browsers differ in what stays open: it counts as open.
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._note("text", data)

    def handle_comment(self, data: str) -> None:
        # Browsers end some comments earlier, and take other things for comments; so do older and newer Pythons.
        at, column = self.getpos()
        raw, said = self._lines[at - 1 :], f"<!--{data}-->"
        is_one = "\n".join(raw[: 1 + data.count("\n")])[column:].startswith(said)
        if not is_one or data.startswith((">", "->")) or re.search(r"--(!|\s+)>", data):
            self.styling = "what is no comment to all browsers"
        if said == BEGIN and self.around is None:
            self.around, self._is_inside = list(self._open), True
        elif said == END:
            self._is_inside = False
        else:
            self._note("comment", data)

    def handle_decl(self, decl: str) -> None:
        self.styling = "<!...>"

    def unknown_decl(self, data: str) -> None:
        self.styling = "<![...]>"

    def handle_pi(self, data: str) -> None:
        self.styling = "<?...>"
