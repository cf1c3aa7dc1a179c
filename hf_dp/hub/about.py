"""What a card says of its model beside its privacy: what it was made from, its licence, who answers for it, its use.

Nobody but its author knows most of it. It stands in one short table, with a list of what is still to be said; headings
that nobody filled in, as templates of cards have them by the page, are left out.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from markdown_it import MarkdownIt

BEGIN, END = "<!-- hf_dp about begins -->", "<!-- hf_dp about ends -->"
_HEADING, _UNSAID = "About", "not said yet"
_STILL = "**Its author has still to say**, in this table where nothing else is named:"
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
# In cards that Trainer drafts; and what a card says whose author wants its results published.
BY_TRAINER = "<!-- This model card has been generated automatically"
RESULTS = "*The results in this card were computed without noise, and are not covered by epsilon.*"
_ACHIEVES, _HISTORY, _SEED = "It achieves the following results", "### Training results", "- seed:"


def about(text: str, data: Any) -> str:
    """The table as Markdown, between its two markers: what its author wrote there, then what the card's metadata says.

    Args:
        text: of the card, in which the table may stand. What else its author wrote between the markers stays.
        data: the card's metadata.

    Returns:
        Nothing where the card has such a section without markers: that is its author's own.
    """
    rest, table = taken_out(text)
    if not table and any(level == 2 and heading.strip("#- \n") == _HEADING for heading, level, _ in _parts(rest)):
        return ""
    written, rows, words = _written(table)
    said = {name: written.get(name) or (_one_line(data.get(key)) if key else "") for name, key, _ in _ROWS}
    lines = [BEGIN, f"## {_HEADING}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value or _UNSAID} |" for name, value in said.items()] + rows
    if missing := [how for name, how in _asked().items() if not said[name]]:
        lines += ["", _STILL, "", *missing]
    return "\n".join([*lines, *(["", *words, ""] if words else []), END])


def contradicted(table: str, data: Any) -> list[str]:
    """What the table says otherwise than the card's metadata, in words."""
    written, _, _ = _written(table)
    both = [(name, written.get(name), key, _one_line(data.get(key))) for name, key, _ in _ROWS if key]
    return [
        f"{name}: {said!r}, and `{key}`: {meant!r}"
        for name, said, key, meant in both
        if said and meant and not re.search(rf"(?<!\w){re.escape(meant)}(?!\w)", said, re.IGNORECASE)
    ]


def taken_out(text: str) -> tuple[str, str]:
    """A card without the table, and the table; the first of several, and the others without their marks."""
    start = text.find(BEGIN)
    stop = text.find(END, start)
    if not 0 <= start < stop or BEGIN in text[start + 1 : stop]:
        return _unmarked(text), ""
    stop += len(END)
    return _unmarked(f"{text[:start].rstrip()}\n\n{text[stop:].lstrip()}"), text[start:stop]


def _unmarked(text: str) -> str:
    return text.replace(f"{BEGIN}\n", "").replace(f"\n{END}", "").replace(BEGIN, "").replace(END, "")


@functools.cache
def template() -> tuple[frozenset[str], frozenset[str]]:
    """The lines of the hub's template for cards, and the headings among them."""
    text = ModelCard.from_template(ModelCardData()).text
    return frozenset(line.strip() for line in text.split("\n")), frozenset(name for name, _, _ in _parts(text))


def without_padding(text: str, title: str) -> str:
    """A card without the headings of templates under which nothing was filled in, and with `title` for theirs."""
    known, headings = template()
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


def without_results(text: str) -> str:
    """A card without the losses, metrics and seed that Trainer drafted of another training, which lay there before;
    one that nobody else has drafted, or whose author wants them published, is left as it is."""
    if BY_TRAINER not in text or RESULTS in text:
        return text
    lines, told = text.split("\n"), set[int]()
    for heading, _, numbers in _parts(text):
        if heading == _HISTORY:
            told |= {numbers.start - 1, *numbers}
        elif (first := next((number for number in numbers if lines[number].startswith(_ACHIEVES)), None)) is not None:
            told |= {first, *itertools.takewhile(lambda n: lines[n].strip(), range(first + 1, numbers.stop))}
        told |= {number for number in numbers if lines[number].startswith(_SEED)}
    return "\n".join(line for number, line in enumerate(lines) if number not in told)


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


def _written(table: str) -> tuple[dict[str, str], list[str], list[str]]:
    """What somebody wrote into the rows of the table, rows of their own, and what else, each line as it is."""
    lines, code = _unmarked(table).split("\n"), _code(_unmarked(table))
    ours = {f"## {_HEADING}", _STILL, *_asked().values()}
    found, own, words = dict[str, str](), list[str](), list[str]()
    is_row = [line.lstrip().startswith("|") and number not in code for number, line in enumerate(lines)]
    for are_rows, group in itertools.groupby(range(len(lines)), is_row.__getitem__):
        block = list(group)
        rows = [(*_cells(lines[number]), lines[number].strip()) for number in block]
        if not are_rows or not any(name in _asked() for name, _, _ in rows):
            words += [lines[number] for number in block if number in code or lines[number].strip() not in ours]
            continue
        for name, value, row in rows:
            is_asked = name in _asked() and (value in ("", _UNSAID) or found.setdefault(name, value) == value)
            if not is_asked and row.strip("|-: "):
                own.append(row)
    return found, own, "\n".join(words).strip("\n").split("\n") if any(map(str.strip, words)) else []


def _cells(row: str) -> tuple[str, str]:
    name, _, value = row.strip().strip("|").partition("|")
    return name.strip(), value.strip()


def _asked() -> dict[str, str]:
    """The line that asks for each row."""
    return {name: f"- {name}: {how}" for name, _, how in _ROWS}


def _one_line(value: Any) -> str:
    said = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")
    return " ".join(said.replace("|", " ").replace("<", " ").split())
