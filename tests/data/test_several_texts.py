"""Rows that hold several texts each, as a batch tells of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

from hf_dp.data.several_texts import is_cut, packed_by
from tests.training.workbench import Rows, make, pad
from tests.zoo import tiny


@pytest.mark.parametrize(
    ("name", "row", "mask", "is_packed"),
    [
        ("position_ids", [0, 1, 2, 0, 1], [1, 1, 1, 1, 1], True),
        ("position_ids", [0, 1, 2, 0, 1], None, True),
        ("position_ids", [0, 1, 2, 3, 4], [1, 1, 1, 1, 1], False),
        ("position_ids", [0, 1, 2, 0, 0], None, False),
        ("position_ids", [1, 1, 0, 1, 2], [0, 0, 1, 1, 1], False),
        ("seq_idx", [0, 0, 1, 1, 1], None, True),
        ("seq_idx", [0, 0, 0, -1, -1], None, False),
        ("token_type_ids", [0, 0, 1, 1, 1], None, False),
    ],
)
def test_rows_of_several_texts_are_told_by_positions_or_numbers(
    name: str, row: list[int], mask: list[int] | None, is_packed: bool
) -> None:
    plain = torch.arange(5) if name == "position_ids" else torch.zeros(5, dtype=torch.long)
    batch = {name: torch.stack([plain, torch.tensor(row)])}
    if mask is not None:
        batch["attention_mask"] = torch.tensor([[1] * 5, mask])
    assert packed_by(batch) == (name if is_packed else None)
    assert packed_by({name: torch.zeros(2, 3, 5)}) is None


def test_a_collator_that_brings_them_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def packed(examples: Rows) -> dict[str, torch.Tensor]:
        batch = pad(examples)
        return {**batch, "position_ids": (torch.arange(batch["input_ids"].shape[1]) % 2).expand_as(batch["input_ids"])}

    make(tmp_path, parts={"data_collator": packed}, max_steps=1).train()
    assert caplog.text.count("Rows hold several texts each, by their 'position_ids'.") == 1


@pytest.mark.parametrize(
    ("labels", "mask", "found"),
    [
        ([[5, 6, 7], [8, 9, 5]], None, True),
        ([[5, 6, 7], [8, 9, 5]], [[1, 1, 1], [1, 1, 1]], True),
        ([[5, 6, 7], [8, 9, 5]], [[1, 1, 1], [1, 1, 0]], False),
        ([[-100, 6, 7], [8, 9, 5]], None, False),
        ([5, 6], None, False),
    ],
)
def test_rows_of_nothing_but_what_is_learnt(labels: list[Any], mask: list[Any] | None, found: bool) -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 5]]), "labels": torch.tensor(labels)}
    if mask is not None:
        batch["attention_mask"] = torch.tensor(mask)
    assert is_cut(batch) == found


@pytest.mark.parametrize(("lengths", "warnings"), [([6], 1), ([5, 6], 0)])
def test_blocks_cut_from_texts_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lengths: list[int], warnings: int
) -> None:
    """What `group_texts` makes: no text is a row, and nothing else says so."""
    draw = random.Random(0)
    ids = [[draw.randrange(1, 30) for _ in range(lengths[i % len(lengths)])] for i in range(24)]
    data = Dataset.from_list([{"input_ids": each, "labels": each} for each in ids])

    def padded(rows: Rows) -> dict[str, torch.Tensor]:
        return {
            name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=at)
            for name, at in (("input_ids", 0), ("labels", -100))
        }

    parts = {"train_dataset": data, "data_collator": padded}
    make(tmp_path, tiny("gpt2", "causal_lm"), parts=parts, max_steps=1).train()
    assert caplog.text.count("All rows have 6 tokens") == warnings
