"""What docs/proof.md takes for granted, and what docs/failures.md says was prevented: each with tests that exist, or
"unchecked"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASSUMPTIONS, FAILURES = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("proof.md", "failures.md"))
HEADING = "Failures, and what prevents them"
CLASSES = ("Critical", "Theoretical", "Negligible")


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of each row of the table under a heading."""
    (section,) = re.findall(rf"^#+ {heading}$(.*?)(?=^#+ |\Z)", page, re.M | re.S)
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return table[2:]


def missing(cell: str) -> list[str]:
    """Tests that a cell names and that there are not."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    assert named, cell
    return [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^ *def {name}", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.M)
    ]


def complaints(assumptions: str, failures: str) -> list[str]:
    """What is wrong with the tables of the two pages."""
    found = []
    for what, _, checked, severity in rows(assumptions, "Assumptions"):
        found += [] if severity in CLASSES else [f"class of {what}"]
        found += [] if checked == "unchecked" else missing(checked)
    for number, (place, what, severity, _, checked) in enumerate(rows(failures, HEADING), 1):
        found += [] if place == str(number) and severity in (*CLASSES, "none") else [f"number or class of {what}"]
        found += missing(checked)
    return found


def test_every_assumption_and_failure_names_tests_that_exist_or_is_unchecked() -> None:
    assert complaints(ASSUMPTIONS, FAILURES) == []
    assert len(rows(ASSUMPTIONS, "Assumptions")) > 20
    assert len(rows(FAILURES, HEADING)) >= 146


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("::test_failure_33`", "::test_failure_33_that_nobody_wrote`"),
        ("| unchecked | Critical |", "| unchecked | Harmless |"),
        ("| 7 | ", "| 8 | "),
    ],
)
def test_negative_control_a_table_that_is_off_is_noticed(old: str, new: str) -> None:
    both = [page.replace(old, new, 1) for page in (ASSUMPTIONS, FAILURES)]
    assert both != [ASSUMPTIONS, FAILURES]
    assert complaints(*both)
