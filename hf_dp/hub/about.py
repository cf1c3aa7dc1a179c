"""What a card says of its model beside its privacy: what it was made from, its licence, who answers for it, its use.

Nobody but its author knows most of it. It stands in one short table, with a list of what is still to be said; headings
that nobody filled in, as templates of cards have them by the page, are left out.
"""

from __future__ import annotations

import itertools
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from markdown_it import MarkdownIt

BEGIN, END = "<!-- hf_dp about begins -->", "<!-- hf_dp about ends -->"
_UNSAID = "not said yet"
# Each row, the name that it has in the metadata of cards, if it has one, and how an author says it.
_ROWS = (
    ("made from", "base_model", "the model before, as `base_model` in the metadata of this card, or here, if none"),
    ("licence", "license", "the terms of use, as `license` in the metadata of this card"),
    ("who answers for it", None, "a name and an address, for questions and for people whose data was used"),
    ("meant for", None, "which uses it was made and tested for"),
    ("not meant for", None, "which uses it must not be put to"),
)  # fmt: skip
_TO_BE_FILLED = "more information needed"


def about(text: str, data: Any) -> str:
    """The table as Markdown, between its two markers: from the card's metadata, and what its author wrote in the table.

    Args:
        text: of the card, in which the table may stand.
        data: the card's metadata.
    """
    written = _written(text)
    said = {name: _one_line(data.get(key)) if key and data.get(key) else written.get(name) for name, key, _ in _ROWS}
    lines = [BEGIN, "## About", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value or _UNSAID} |" for name, value in said.items()]
    if missing := [f"- {name}: {how}" for name, _, how in _ROWS if said[name] is None]:
        lines += ["", "**Its author has still to say**, in this table where nothing else is named:", "", *missing]
    return "\n".join([*lines, END])


def taken_out(text: str) -> tuple[str, str]:
    """A card without the table, and the table; where there are several, without their marks, and none."""
    start, stop = text.find(BEGIN), text.find(END)
    if not (text.count(BEGIN) == text.count(END) == 1 and start < stop):
        return text.replace(f"{BEGIN}\n", "").replace(f"\n{END}", "").replace(BEGIN, "").replace(END, ""), ""
    stop += len(END)
    return f"{text[:start].rstrip()}\n\n{text[stop:].lstrip()}", text[start:stop]


def without_padding(text: str, title: str) -> str:
    """A card without the headings of templates under which nothing was filled in, and with `title` for theirs."""
    template = ModelCard.from_template(ModelCardData()).text
    known, headings = {line.strip() for line in template.split("\n")}, {name for name, _, _ in _parts(template)}

    def is_padding(line: str) -> bool:
        said = line.strip()
        return _asks(said) or (said in known and (_TO_BE_FILLED in said.casefold() or said.startswith("<!--")))

    if not any(map(is_padding, text.split("\n"))):
        return text
    kept, below = list[str](), 0  # the level of the part below, where it is a template's
    for heading, level, lines in reversed(_parts(text)):
        is_filled = any(line.strip() not in known and not _asks(line) for line in lines)
        is_drafted = heading in headings or any(map(is_padding, lines))
        if is_filled or not is_drafted or level == 1 or (heading in headings and below > level):
            own = [line for line in lines if not is_padding(line)]
            name = f"# {title}" if level == 1 and heading in headings else heading
            kept.append("\n".join([name, *own]).strip("\n"))
            below = level if heading in headings else 0
    return "\n\n".join(part for part in reversed(kept) if part) + "\n"


def _asks(line: str) -> bool:
    return line.strip(" []*_.").casefold() == _TO_BE_FILLED


def _parts(text: str) -> list[tuple[str, int, list[str]]]:
    """Each heading as it is written with its level and the lines below it; the introduction under an empty one."""
    lines = text.split("\n")
    tokens = MarkdownIt("commonmark").parse(text)
    found = [(*t.map, int(t.tag[1])) for t in tokens if t.map and t.type == "heading_open" and not t.level]
    starts = [(0, 0, 0), *found, (len(lines), len(lines), 0)]
    return [
        ("\n".join(lines[start:below]).strip(), level, lines[below:stop])
        for (start, below, level), (stop, _, _) in itertools.pairwise(starts)
    ]


def _written(text: str) -> dict[str, str]:
    """What somebody wrote into the rows of the table."""
    _, table = taken_out(text)
    rows = (line.strip().strip("|").partition("|") for line in table.split("\n") if line.strip().startswith("|"))
    found = {name.strip(): value.strip() for name, _, value in rows}
    return {name: found[name] for name, _, _ in _ROWS if found.get(name) not in (None, "", _UNSAID)}


def _one_line(value: Any) -> str:
    said = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return " ".join(said.replace("|", " ").replace("<", " ").split())
