"""The coverage tables as pages: written, read again, and put between the README's marks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec

from tests import low_bits

COMMAND = "python scripts/coverage.py --write"
MARKS = (f"<!-- coverage begins: {COMMAND} -->", "<!-- coverage ends -->")
Results = Mapping[str, Mapping[str, Mapping[str, str]]]


def markdown(results: Results) -> str:
    """The whole page: a table for each part, and below it why something is refused."""
    optional = dict.fromkeys(name for name, _ in low_bits.KINDS.values() if find_spec(name))
    versions = ", ".join([_versions(), *(f"{name} {version(name)}" for name in optional)])
    about = (
        f'Written by `{COMMAND}` ({versions}), which explains how each case is judged. "exact" is followed by the '
        'largest relative error of norms and sums in float64 against a loop over single examples, "within" by that of '
        "bf16 norms against a loop in float32. What is refused is refused by name before anything is released; its "
        "reasons are below each table. \"Experts batched\" is `model.set_experts_implementation('batched_mm')`, and "
        "\"in a loop\" with 'eager'."
    )
    lines = ["# Coverage", "", *textwrap.wrap(about, 120, break_on_hyphens=False)]
    for title, rows in results.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines += ["", f"## {title}", "", f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        for name, row in rows.items():
            cells = [row.get(column, "-").split(":")[0] for column in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += _reasons(rows)
    return "\n".join(lines) + "\n"


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))


def read(page: str) -> dict[str, dict[str, dict[str, str]]]:
    """The results that `markdown` made a page of.

    Raises:
        ValueError: they were found with other versions, so that rows of both would not be comparable.
    """
    if _versions() not in page.replace("\n", " "):
        raise ValueError(f"docs/coverage.md was not written with {_versions()}; write all rows")
    results: dict[str, dict[str, dict[str, str]]] = {}
    for section in page.split("\n## ")[1:]:
        title, header, _, *lines = [line for line in section.splitlines() if line]
        columns, rows = _cells(header), results.setdefault(title, {})
        for name, *cells in (_cells(line) for line in lines if line.startswith("|")):
            rows[name] = {c: text for c, text in zip(columns[1:], cells, strict=True) if text != "-"}
            for line in lines:
                if line.startswith(f"- {name} ("):
                    where, _, reason = line.removeprefix(f"- {name} (").partition("): ")
                    rows[name] |= {column: f"{rows[name][column]}: {reason}" for column in where.split(", ")}
    return results


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def merged(old: Results, new: Results) -> dict[str, dict[str, Mapping[str, str]]]:
    """`old` with the rows of `new` in place of theirs, or after them."""
    return {title: {**old.get(title, {}), **rows} for title, rows in new.items()}


def _reasons(rows: Mapping[str, Mapping[str, str]]) -> list[str]:
    lines = []
    for name, row in rows.items():
        columns: dict[str, list[str]] = {}
        for column, text in row.items():
            if ":" in text:
                columns.setdefault(_shortened(text.partition(": ")[2]), []).append(column)
        lines += [f"- {name} ({', '.join(where)}): {reason}" for reason, where in columns.items()]
    return ["", *lines] if lines else []


def _shortened(reason: str) -> str:
    """The first of several parameters stands for all."""
    return re.sub(r"(\w+\.[\w.]+)(, \w+\.[\w.]+)+", r"\1 and others", reason)


def summary(results: Results) -> str:
    """The README's table: one row for each part, and what in it is exact and what is refused."""
    lines = ["| | exact | refused by name |", "| --- | --- | --- |"]
    for title, rows in results.items():
        exact, refused = [], []
        for name, row in rows.items():
            left_out = [column for column, text in row.items() if text.startswith(("refused", "WRONG"))]
            known = [column for column, text in row.items() if text != "-"]
            if len(left_out) < len(known):
                exact.append(name)
            if left_out:
                refused.append(name if left_out == known else f"{name} ({', '.join(left_out)})")
        lines.append(f"| {title} | {'; '.join(exact) or '-'} | {'; '.join(refused) or '-'} |")
    lines += [
        "",
        "Each head with the largest error found, and why something is refused: [docs/coverage.md](docs/coverage.md).",
    ]
    return "\n".join(lines)


def between_marks(text: str, new: str) -> str:
    """`text` with `new` where the coverage marks are.

    Raises:
        ValueError: it has no marks.
    """
    pattern = r"<!-- coverage begins.*?-->.*?" + re.escape(MARKS[1])
    if not re.search(pattern, text, flags=re.S):
        raise ValueError(f"no {MARKS[0]} ... {MARKS[1]} to write between")
    return re.sub(pattern, lambda _: f"{MARKS[0]}\n\n{new}\n\n{MARKS[1]}", text, flags=re.S)
