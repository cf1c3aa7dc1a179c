"""A micro-batch that is wider or narrower than those that were checked is known by what the collator made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_dp.data.collate import LogicalBatchCollator, Unit
from hf_dp.data.widths import Checked, outermost, widths_of

Pair = tuple[str, str]


def tokens(rows: list[Pair]) -> dict[str, Tensor]:
    """A source and a target, as wide as the longest in words; of the rows themselves nothing tells it."""
    counts = {name: [len(row[i].split()) for row in rows] for i, name in enumerate(("input_ids", "labels"))}
    return {name: torch.tensor([[1] * n + [0] * (max(ns) - n) for n in ns]) for name, ns in counts.items()}


def pair(source: int, target: int) -> Pair:
    return ("a " * source).strip(), ("b " * target).strip()


def looked_at(collate: LogicalBatchCollator, *rows: Pair) -> list[list[Pair]]:
    found: list[list[Pair]] = collate(list(rows)).get("unlike", [])
    return found


def test_widths_are_those_of_all_axes_but_the_first() -> None:
    batch = {"x": torch.ones(2, 3, 4), "y": torch.ones(2), "text": ["a", "b"]}
    assert widths_of(batch) == {("x", 0): 3, ("x", 1): 4}


def test_what_a_mask_and_positions_tell_where_all_are_of_one_width() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    found = widths_of({"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)})
    assert found == {
        ("attention_mask", 0): 4,
        ("attention_mask", -1): 3,
        ("attention_mask", -2): 0,
        ("attention_mask", -3): 0,
        ("attention_mask", -4): 2,
        ("position_ids", 0): 4,
        ("position_ids", -1): 2,
    }


def test_the_outermost_of_each_axis_the_narrowest_first() -> None:
    rows = [pair(5, 5), pair(2, 9), pair(7, 1), pair(3, 3), pair(8, 8)]
    measure = LogicalBatchCollator(2, tokens).widths
    assert outermost(rows, measure) == [pair(3, 3), pair(7, 1), pair(2, 9), pair(8, 8)]
    assert outermost([rows[0]] * 3, measure) == [rows[0]] * 2


def test_what_is_wider_or_narrower_than_all_before_is_looked_at_once() -> None:
    collate = LogicalBatchCollator(2, tokens)
    short, long = pair(3, 3), pair(6, 6)
    assert looked_at(collate, pair(40, 1)) == []
    collate.checked = Checked([short, long], collate.widths)
    assert looked_at(collate, pair(4, 6), pair(3, 5), long, short) == []
    ((narrowest, *_, widest),) = looked_at(collate, pair(4, 4), pair(9, 4))
    assert (narrowest, widest) == (short, pair(9, 4))
    assert looked_at(collate, pair(9, 6), short) == []
    for narrow in (pair(2, 4), pair(4, 2)):
        (rows,) = looked_at(collate, narrow)
        assert narrow in rows
        assert max(len(row[0]) for row in rows) > len(narrow[0])
        assert looked_at(collate, narrow) == []
    first, second = looked_at(collate, pair(20, 6), pair(20, 6), pair(3, 30))
    assert pair(20, 6) in first
    assert pair(3, 30) in second


def test_later_rows_are_held_against_those_that_add_something() -> None:
    collate = LogicalBatchCollator(2, tokens)
    silent, short, long = pair(3, 3), pair(4, 4), pair(6, 6)
    collate.checked = Checked([silent, short, long], collate.widths, always=[short, long])
    for unlike in (pair(2, 2), pair(9, 9)):
        (rows,) = looked_at(collate, unlike)
        assert [sum(row is one for row in rows) for one in (short, long)] == [1, 1]
        assert unlike in rows


def test_a_tensor_that_was_not_there_before_is_looked_at() -> None:
    def mask_where_padded(rows: list[Pair]) -> dict[str, Tensor]:
        batch = tokens(rows)
        return {**batch, "attention_mask": batch["input_ids"].ne(0)} if bool(batch["input_ids"].eq(0).any()) else batch

    collate = LogicalBatchCollator(2, mask_where_padded)
    collate.checked = Checked([pair(3, 3), pair(6, 6)], collate.widths)
    assert looked_at(collate, pair(3, 3), pair(6, 6)) == [[pair(3, 3), pair(6, 6)]]
    assert looked_at(collate, pair(3, 3), pair(6, 6)) == []


def test_each_piece_of_a_unit_is_looked_at() -> None:
    collate = LogicalBatchCollator(2, tokens)
    collate.checked = Checked([pair(3, 3), pair(6, 6)], collate.widths)
    unit = Unit([pair(4, 4), pair(5, 5), pair(9, 4), pair(3, 6), pair(8, 4)])
    found = collate([unit, Unit([pair(5, 3)])])
    assert [whose.units for whose in found["owners"]] == [[0], [0, 0], [0, 0], [0]]
    ((*_, widest),) = found["unlike"]
    assert widest in unit.rows
    assert looked_at(collate, widest) == []


@pytest.mark.parametrize(
    ("mask", "begins", "holes"),
    [
        ([1, 1, 1], 0, 0),
        ([0, 1, 1], 1, 0),
        ([1, 0, 1], 0, 1),
        ([1, 1, 0], 0, 0),
        ([0, 0, 0], 0, 0),
        ([0, 1, 0, 1], 1, 1),
    ],
)
def test_what_a_mask_hides_is_a_width(mask: list[int], begins: int, holes: int) -> None:
    found = widths_of({"attention_mask": torch.tensor([mask])})
    assert (found["attention_mask", -2], found["attention_mask", -3]) == (begins, holes)
