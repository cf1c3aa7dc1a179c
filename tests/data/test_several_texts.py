"""Rows that hold several texts each, as a batch tells of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_dp.data.several_texts import packed_by
from tests.training.workbench import Rows, make, pad


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
