"""Which of a card's text its readers see: rendered as on the hub, with all that could lie over it or hide it."""

from __future__ import annotations

import itertools
import re
import unicodedata
from html.parser import HTMLParser

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore

from hf_dp.hub.card import BEGIN, END

# Bytes. Time grows with some texts' square.
_LARGEST_TEXT = 1 << 16
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
# They act on others than those inside them, or browsers read what is inside them otherwise than as tags.
_STYLING = {
    "style", "link", "script", "base", "meta", "html", "head", "body", "frameset", "dialog", "template", "select",
    "textarea", "title", "xmp", "iframe", "noembed", "noframes", "noscript", "plaintext", "math", "form",
}  # fmt: skip
# What drawings are made of, and what a whole one may have: nothing that moves it, or shows it beyond its own edges.
_DRAWN = {"g", "path", "circle", "ellipse", "rect", "line", "polyline", "polygon", "text", "tspan"}
_OF_SVG = {
    "xmlns", "version", "width", "height", "viewbox", "preserveaspectratio", "fill", "stroke", "stroke-width",
    "stroke-linecap", "stroke-linejoin", "role", "aria-hidden", "aria-label", "class", "style", "id",
}  # fmt: skip
# Ends that may be left out, where what is around them ends; and what ends a paragraph that is open.
_IMPLIED = {"p", "li", "dt", "dd", "td", "th", "tr", "thead", "tbody", "tfoot"}
_ENDING = {"ul", "ol", "dl", "table", "div", "center", "details"}
_AFTER_P = {"p", "hr", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", *_ENDING} - {"table"}
# Styles that lay nothing over other elements.
_STYLES = {
    "text-align", "vertical-align", "align-items", "justify-content", "gap", "display", "color", "font-size",
    "font-weight", "font-style", "width", "max-width", "min-width", "background", "background-color", "border",
    "border-radius", "padding", "margin", "margin-top", "margin-bottom", "margin-left", "margin-right",
    "letter-spacing", "font-family", "text-transform",
}  # fmt: skip
_MOVING_STYLE = re.compile(r"-[\d.]|[(\\/]")
_MOVING_CLASS = re.compile(
    r"fixed|absolute|sticky|inset|overlay|translate|scale|rotate|skew|animate|overflow-visible|\["
    r"|(^|[\s:!])(-|(top|bottom|left|right|start|end|z)-(\d|px|full|auto))"
)
# What is larger than its box lies over what follows, or over the text beside it: no picture is.
_SMALL_CLASS = re.compile(r"(^|[\s:!])(float|h|max-h|size|leading)-")
_OF_PICTURES = {"height", "float"}
# Marks over one letter; no script has as many, and with more they reach over other lines.
_MOST_MARKS = 8
# Tags as browsers read them (https://html.spec.whatwg.org/multipage/parsing.html#tokenization), and what begins one.
_TAG = re.compile(
    r"""<(?:!--.*?-->|/[a-z][a-z0-9-]*[ \t\n\f]*>|[a-z][^ \t\n\f/>]*+(?:[ \t\n\f/]*+[^ \t\n\f/>][^ \t\n\f/>=]*+"""
    r"""[ \t\n\f]*+(?:=[ \t\n\f]*+(?:"[^"]*"|'[^']*'|[^ \t\n\f"'>][^ \t\n\f>]*+|(?=>))|(?!=)))*+[ \t\n\f/]*+>)""",
    re.IGNORECASE | re.DOTALL | re.ASCII,
)
_BEGINS_A_TAG = re.compile(r"<[a-z!/?]", re.IGNORECASE | re.ASCII)
# Where addresses are links without marks around them, they have the mark in them that makes no tag of the next letters.
_ADDRESS, _MARK_IN_ADDRESS = re.compile(r"://|www\.|@|mailto:|xmpp:"), re.compile(r"[\\`]|\]\($")
# What hides marks from an address behind it; and an address, which hides those in it from the text behind.
_CODE_OR_ADDRESS = re.compile(
    r"\\.|(?P<code>`++).*?[^`](?P=code)(?!`)|`++|<[^<>]*>|(?P<address>(?:" + _ADDRESS.pattern + r")[^\s<]*+)",
    re.DOTALL,
)
_FOOTNOTE = re.compile(r"\[\^[^]\n]{0,999}\]:")
# What stands between these the hub makes a formula of, before it reads Markdown: whatever lies there, code too.
_FORMULAS = (("$$", "$$"), (r"\\(", r"\\)"))
# In formulas these show something elsewhere, or what they are is said elsewhere. A length follows a command, another
# argument or a comment: in GPT-2 in, and in - 2 inputs, is none.
_MOVING_FORMULA = re.compile(
    r"\\(raise|lower|rule|smash|genfrac|@|expandafter|noexpand|\w*def|\w*let|\w*command|html\w+|includegraphics)"
    r"|(\\[A-Za-z]++\s*+\*?|[][{}%])\s*+-\s*[\d.]+\s*(em|ex|px|pt|mu|cm|mm|in|bp|pc|dd|cc|nd|nc|sp)"
)


def why_hidden(body: str, section: str) -> str | None:
    """Why a reader of the card's Markdown would not see its privacy section as it was written; None if they would."""
    if len(body.encode()) > _LARGEST_TEXT:
        return f"the card is too long to tell what of it is seen (more than {_LARGEST_TEXT} bytes)"
    if (formula := _formula_over(body, section)) is not None:
        return formula
    # Each with what stands before it, up to a blank.
    for before in (re.split(r"\s", part)[-1] for part in body.split("<")[:-1]):
        if (begun := _ADDRESS.search(before)) is not None and _MARK_IN_ADDRESS.search(before, begun.start()):
            return f"a tag could begin behind the address in {before[:100]}"
    # Some readers take for a table, a footnote or an address what others take for code, HTML or a link.
    bodies = dict.fromkeys((body, _FOOTNOTE.sub("", body)))
    readers = (_markdown(), _markdown("table"), _markdown("table", addresses=True))
    whys = (_why_otherwise(_seen(one, reader), _seen(section, reader)) for one in bodies for reader in readers)
    return next(filter(None, whys), None)


def _why_otherwise(here: _Page, alone: _Page) -> str | None:
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
    # A comment goes on to the end of its line; \% begins none.
    within += [re.sub(r"%[^\n]*", "%", formulas) for formulas in within]
    moving = next(filter(None, map(_MOVING_FORMULA.search, within)), None)
    return None if moving is None else f"a formula with {moving[0]} could lie over it"


def _markdown(*others: str, addresses: bool = False) -> MarkdownIt:
    """CommonMark with `others` of its extensions, and maybe with `addresses` that are links without marks around."""
    markdown = MarkdownIt("commonmark").enable(list(others))
    if addresses:
        markdown.core.ruler.after("block", "addresses", _take_marks_out_of_addresses)
    return markdown


def _take_marks_out_of_addresses(state: StateCore) -> None:
    def without_marks(found: re.Match[str]) -> str:
        return found[0] if found["address"] is None else re.sub(r"[\\`]|\]\(", "", found[0])

    for token in state.tokens:
        if token.type == "inline":
            token.content = _CODE_OR_ADDRESS.sub(without_marks, token.content)


def _seen(text: str, markdown: MarkdownIt) -> _Page:
    rendered = markdown.render(text)
    page, tags = _Page(rendered), _tags(rendered)
    if tags is not None:
        page.feed(rendered)
        page.close()
    if tags != page.tags:
        page.around, page.styling = [], "a tag that has no end, or another for some browsers,"
    return page


def _tags(rendered: str) -> list[str] | None:
    """All tags that begin an element, as browsers read them; None where something begins as one and is none."""
    found, at = list[str](), 0
    while (begun := _BEGINS_A_TAG.search(rendered, at)) is not None:
        if (tag := _TAG.match(rendered, begun.start())) is None:
            return None
        found += [tag[0]] if tag[0][1] not in "!/" else []
        at = tag.end()
    return found


def _could_lie_over_others(tag: str, attribute: str, value: str) -> bool:
    if attribute == "class":
        return bool(_MOVING_CLASS.search(value) or (tag != "img" and _SMALL_CLASS.search(value)))
    if attribute == "align":
        return tag == "table" and value.strip().casefold() in ("left", "right")
    names = {style.partition(":")[0].strip().casefold() for style in value.split(";")} - {""}
    known = _STYLES | _OF_PICTURES if tag == "img" else _STYLES
    return attribute == "style" and (not names <= known or _MOVING_STYLE.search(value) is not None)


class _Page(HTMLParser):
    """The rendered card.

    Attributes:
        around: names of the elements that are open where the section begins; None if nothing begins there.
        inside: what is between the section's marks.
        tags: all that begin an element, as they are written.
        styling: what acts on others than those inside it, or is read otherwise by browsers than here, if there is any.
    """

    def __init__(self, rendered: str) -> None:
        super().__init__(convert_charrefs=True)
        self._lines = rendered.split("\n")
        self.around: list[str] | None = None
        self.inside: list[tuple[object, ...]] = []
        self.styling: str | None = None
        self.tags: list[str] = []
        self._open: list[str] = []
        self._is_inside = False

    def _note(self, *what: object) -> None:
        if self._is_inside:
            self.inside.append(what)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note("start", tag, *attrs)
        self.tags.append(self.get_starttag_text() or "")
        if self._open[-1:] == ["p"] and tag in _AFTER_P:
            self._open.pop()
        is_strange = "svg" in self._open and tag not in _DRAWN
        if tag in _STYLING or is_strange or (tag == "svg" and not {name for name, _ in attrs} <= _OF_SVG):
            self.styling = f"<{tag}>"
        elif any(_could_lie_over_others(tag, name, value or "") for name, value in attrs):
            self.styling = f"the style or class of <{tag}>"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Browsers take no notice of the slash in <div/>.
        is_drawn = "svg" in self._open and tag in _DRAWN
        self.handle_starttag(tag, attrs)
        if is_drawn:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        self._note("end", tag)
        # Some of these end the whole drawing.
        if "svg" in self._open and self._open[-1] != tag:
            self.styling = f"</{tag}>"
        inner = list(itertools.takewhile(_IMPLIED.__contains__, reversed(self._open))) if tag in _ENDING else []
        if len(inner) < len(self._open) and self._open[-1 - len(inner)] == tag:
            del self._open[len(self._open) - len(inner) :]
        # Where tags cross, browsers differ in what stays open: it counts as open.
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self._note("text", data)
        marks = itertools.groupby(unicodedata.category(letter) in ("Mn", "Me") for letter in data)
        if any(are_marks and sum(1 for _ in group) > _MOST_MARKS for are_marks, group in marks):
            self.styling = f"more than {_MOST_MARKS} marks over one letter"

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
