"""Micro-batches of one width: how wide an example is computed follows from itself alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_dp.data.collate import LogicalBatchCollator, Unit
from hf_dp.errors import ConfigurationError

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)


class Padding:
    """To the longest, or a multiple; the first id of a row is its number. Masks are whole where nothing is padded."""

    def __init__(self, multiple: int = 1) -> None:
        self.multiple = multiple

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        width = -(-max(len(row["ids"]) for row in rows) // self.multiple) * self.multiple
        ids = torch.tensor([row["ids"] + [-1] * (width - len(row["ids"])) for row in rows])
        return {"ids": ids, "mask": ids.ge(0).long()}


def row(number: int, length: int) -> dict[str, list[int]]:
    return {"ids": [number] + [0] * (length - 1)}


def widths(examples: list[Any], multiple: int, **options: Any) -> dict[int, tuple[int, bool]]:
    """How wide each row is computed, by its number, and whether beside any that is padded."""
    split = LogicalBatchCollator(4, Padding(multiple), **options)
    batches = [batch["ids"] for batch in split(examples)["micro_batches"]]
    assert all(len(batch) <= 4 for batch in batches)
    found = {int(first): (batch.shape[1], bool(batch.min() < 0)) for batch in batches for first in batch[:, 0]}
    assert len(found) == sum(map(len, batches))
    return found


@given(lengths=LENGTHS, multiple=st.sampled_from([1, 4, 16]), most=st.none() | st.integers(1, 100))
def test_a_row_is_as_wide_as_by_itself(lengths: list[int], multiple: int, most: int | None) -> None:
    rows = [row(number, length) for number, length in enumerate(lengths)]
    found = widths(rows, multiple, equal_widths=True, max_tokens=most)
    wide = [-(-length // multiple) * multiple for length in lengths]
    assert found == {number: (wide[number], wide[number] > length) for number, length in enumerate(lengths)}


@given(data=st.data(), multiple=st.sampled_from([1, 4]), most=st.none() | st.integers(1, 100))
def test_a_unit_is_as_wide_as_without_the_others(data: st.DataObject, multiple: int, most: int | None) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=7), min_size=1, max_size=8))
    numbers = iter(range(1000))
    units = [Unit([row(next(numbers), length) for length in lengths]) for lengths in sizes]
    options: dict[str, Any] = {"equal_widths": True, "max_tokens": most}
    together = widths(units, multiple, **options)
    assert together == {k: n for unit in units for k, n in widths([unit], multiple, **options).items()}


def test_without_it_rows_are_as_wide_as_the_longest_beside_them() -> None:
    """Negative control."""
    assert widths([row(0, 3), row(1, 9)], 1) == {0: (9, True), 1: (9, True)}


def test_rows_of_one_width_share_as_before() -> None:
    rows = [row(number, 4 + number % 4) for number in range(8)]
    split = LogicalBatchCollator(4, Padding(8), equal_widths=True)
    assert [len(batch["ids"]) for batch in split(rows)["micro_batches"]] == [4, 4]


def test_widths_that_a_collator_draws_are_refused() -> None:
    def cut(rows: list[Any]) -> dict[str, Tensor]:
        """Wider where there are several."""
        return {"ids": torch.zeros(len(rows), 4 + len(rows), dtype=torch.long)}

    with pytest.raises(ConfigurationError, match="makes 'ids' of 2 examples 6 wide, and 5 at most of each by itself"):
        LogicalBatchCollator(4, cut, equal_widths=True)([row(0, 3), row(1, 3)])


def test_each_row_is_measured_once_and_as_it_was_read() -> None:
    """Collators may take columns out of the rows that they are given."""
    seen = []

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        seen.append(len(rows))
        return Padding()([{"ids": one.pop("ids")} for one in rows])

    split = LogicalBatchCollator(4, collate, equal_widths=True)
    assert len(split([row(number, 5) for number in range(3)])["micro_batches"]) == 1
    assert sorted(seen) == [1, 1, 1, 3]
