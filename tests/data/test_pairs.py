"""Pairs of rows as rows of their own: nothing is lost, and the two of one pair stay together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dp.data.pairs import PairCollator, both, rows_of_pairs
from hf_dp.data.widths import widths_of

EXAMPLES = [(1, -1), (2, -2), (3, -3)]


def firsts_first(examples: list[Any]) -> dict[str, Any]:
    rows = [first for first, _ in examples] + [second for _, second in examples]
    ids = torch.tensor(rows)[:, None].repeat(1, 4)
    return {"input_ids": ids, "mask": ids.gt(0).long(), "margin": torch.ones(len(examples)), "names": ["a"]}


def test_each_pair_has_one_row() -> None:
    batch = PairCollator(firsts_first)(EXAMPLES)
    assert batch["input_ids"].shape == (3, 2, 4)
    assert batch["input_ids"][..., 0].tolist() == [[1, -1], [2, -2], [3, -3]]
    assert batch["margin"].shape == (3,)
    assert batch["names"] == ["a"]


def test_and_is_taken_apart_in_either_order() -> None:
    batch = PairCollator(firsts_first)(EXAMPLES)
    rows: Tensor = rows_of_pairs(batch)["input_ids"][:, 0]
    assert rows.tolist() == [1, -1, 2, -2, 3, -3]
    assert [half.tolist() for half in both(rows)] == [[1, 2, 3], [-1, -2, -3]]
    assert torch.equal(rows_of_pairs(batch, firsts_first=True)["input_ids"], firsts_first(EXAMPLES)["input_ids"])


def test_one_pair() -> None:
    batch = PairCollator(firsts_first)(EXAMPLES[:1])
    assert batch["input_ids"].shape == (1, 2, 4)
    assert batch["margin"].shape == (1,)


def test_how_much_a_mask_shows_of_the_longer_answer() -> None:
    mask = torch.tensor([[[1, 1, 0, 0], [1, 1, 1, 0]]])
    assert widths_of({"attention_mask": mask})["attention_mask", -1] == 3
