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
# Trainer and PEFT put it after the last section of a card, whichever that is.
_BY_LIBRARIES = "### Framework versions"


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
    lines, code = text.split("\n"), _code(text)

    def is_padding(number: int) -> bool:
        said = lines[number].strip()
        is_a_templates = said in known and (_TO_BE_FILLED in said.casefold() or said.startswith("<!--"))
        return number not in code and (_asks(said) or is_a_templates)

    padding = set(filter(is_padding, range(len(lines))))
    if not padding:
        return text
    kept, below = list[str](), 0  # the level of the part that is kept below
    for heading, level, numbers in reversed(_parts(text)):
        own = [number for number in numbers if number not in padding]
        is_filled = any(number in code or lines[number].strip() not in known for number in own)
        is_drafted = heading in headings or len(own) < len(numbers)
        if is_filled or not is_drafted or level == 1 or below > level:
            name = f"# {title}" if level == 1 and heading in headings else heading
            kept.append("\n".join([name, *(lines[number] for number in own)]).strip("\n"))
            below = below if heading == _BY_LIBRARIES else level
    return "\n\n".join(part for part in reversed(kept) if part) + "\n"


def _asks(line: str) -> bool:
    return line.strip(" []*_.").casefold() == _TO_BE_FILLED


def _code(text: str) -> set[int]:
    """The numbers of the lines that are code."""
    tokens = MarkdownIt("commonmark").parse(text)
    return {
        line for token in tokens if token.map and token.type in ("fence", "code_block") for line in range(*token.map)
    }


def _parts(text: str) -> list[tuple[str, int, range]]:
    """Each heading as it is written, its level and the numbers of the lines below it; the introduction's is empty."""
    lines = text.split("\n")
    tokens = MarkdownIt("commonmark").parse(text)
    found = [(*t.map, int(t.tag[1])) for t in tokens if t.map and t.type == "heading_open" and not t.level]
    starts = [(0, 0, 0), *found, (len(lines), len(lines), 0)]
    return [
        ("\n".join(lines[start:below]).strip(), level, range(below, stop))
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
