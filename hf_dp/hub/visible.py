"""Which of a card's text its readers see: rendered as on the hub, with all that could lie over it or hide it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from markdown_it import MarkdownIt

from hf_dp.hub.card import BEGIN, END

# Bytes. Time grows with some texts' square.
_LARGEST_TEXT = 1 << 16
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
