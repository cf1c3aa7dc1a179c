"""Micro-batches of rows that are alike: how an example is computed follows from itself alone."""

from __future__ import annotations

import random
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
@pytest.mark.slow
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

    with pytest.raises(ConfigurationError, match=r"makes 'ids' of shape \(6,\) for each of several.*\(5,\) for one"):
        LogicalBatchCollator(4, cut, equal_widths=True)([row(0, 3), row(1, 3)])


def test_each_row_is_looked_at_once_and_as_it_was_read() -> None:
    """Collators may take columns out of the rows that they are given."""
    seen = []

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        seen.append(len(rows))
        return Padding()([{"ids": one.pop("ids")} for one in rows])

    split = LogicalBatchCollator(4, collate, equal_widths=True)
    assert len(split([row(number, 5) for number in range(3)])["micro_batches"]) == 1
    assert sorted(seen) == [1, 1, 1, 3]


WHOLE, CUT = [1, 1, 1, 1], [1, 1, 1, 0]
FLOAT = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("attention_mask", torch.tensor(WHOLE), torch.tensor(CUT)),
        ("decoder_attention_mask", torch.tensor(WHOLE), torch.tensor(CUT)),
        ("key_padding_mask", torch.tensor(WHOLE).eq(0), torch.tensor(CUT).eq(0)),
        ("attn_masks", torch.tensor(WHOLE), torch.tensor(CUT)),
        ("attention_mask", torch.zeros(4), torch.tensor([0, 0, 0, FLOAT])),
        ("mask", torch.tensor([[WHOLE] * 4]).bool(), torch.tensor([[WHOLE, WHOLE, WHOLE, CUT]]).bool()),
        ("position_ids", torch.arange(4), torch.tensor([0, 1, 0, 1])),
        ("seq_idx", torch.zeros(4), torch.tensor([0, 0, 1, 1])),
        ("global_attention_mask", torch.tensor([1, 0, 0, 0]), torch.tensor([1, 1, 0, 0])),
    ],
    ids=[
        "usual",
        "a decoder's",
        "hides what is true",
        "another name",
        "added to scores",
        "of all pairs",
        "positions",
        "numbers of texts",
        "places that see all",
    ],
)
def test_what_models_decide_by_for_all_rows(name: str, one: Tensor, other: Tensor) -> None:
    """A mask that hides nothing is left out by models, and positions tell whether any row holds several texts."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([row["value"] for row in rows]), "ids": torch.ones(len(rows), 4)}

    split = LogicalBatchCollator(4, collate, equal_widths=True)
    batches = split([{"value": value} for value in (one, other, one)])["micro_batches"]
    assert [batch[name].tolist() for batch in batches] == [torch.stack([one, one]).tolist(), other[None].tolist()]


def test_a_column_that_is_padded_without_a_mask() -> None:
    """A model or a loss of one's own may make its mask from ids."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        return {"ids": Padding(4)(rows)["ids"]}

    split = LogicalBatchCollator(4, collate, equal_widths=True)
    batches = split([row(0, 4), row(1, 3), row(2, 4)])["micro_batches"]
    assert sorted(batch["ids"][:, 0].tolist() for batch in batches) == [[0, 2], [1]]


def test_of_sound_as_much_is_shown() -> None:
    """How many frames there are of a number of samples is the model's affair."""

    def collate(rows: list[dict[str, int]]) -> dict[str, Tensor]:
        shown = torch.tensor([row["shown"] for row in rows])
        return {"input_values": torch.zeros(len(rows), 8), "attention_mask": torch.arange(8) < shown[:, None]}

    split = LogicalBatchCollator(4, collate, equal_widths=True)
    batches = split([{"shown": n} for n in (5, 6, 5, 8)])["micro_batches"]
    assert sorted(batch["attention_mask"].sum(1).tolist() for batch in batches) == [[5, 5], [6], [8]]


@pytest.mark.parametrize("seed", range(20))
def test_units_that_are_wider_than_they_seemed(seed: int) -> None:
    """Their micro-batch is cut once more as it is, and a part of it may hide nothing."""
    draw = random.Random(seed)

    def collate(rows: list[dict[str, str]]) -> dict[str, Tensor]:
        return Padding()([{"ids": [1] * len(row["text"].split())} for row in rows])

    def text() -> dict[str, str]:
        return {"text": " ".join("x" * draw.randint(1, 9) for _ in range(draw.randint(1, 8)))}

    units = [Unit([text() for _ in range(draw.randint(1, 5))]) for _ in range(6)]
    split = LogicalBatchCollator(8, collate, equal_widths=True, max_tokens=8)
    found = split(units)
    assert sum(len(batch["ids"]) for batch in found["micro_batches"]) == sum(len(unit.rows) for unit in units)
