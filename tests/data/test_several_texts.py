"""Rows that hold several texts each, as a batch tells of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

from hf_dp import PrivateRun
from hf_dp.data.several_texts import is_cut, packed_by, pieces_by
from tests.training.workbench import Rows, classifier, make, pad, private, rows
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


@pytest.mark.slow
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
@pytest.mark.slow
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


def pieces(of: list[int]) -> Rows:
    """Rows with the column by which a tokenizer says which text each is a piece of."""
    return [{**row, "overflow_to_sample_mapping": text} for row, text in zip(rows(len(of)), of, strict=True)]


@pytest.mark.parametrize(
    ("of", "found"),
    [([0, 0, 1, 2], True), ([0, 1, 2, 0, 1, 1], True), ([0, 1, 2, 3], False), ([0, 1, 2, 0, 1, 2], False), ([], False)],
)
def test_pieces_of_one_text_lie_beside_each_other(of: list[int], found: bool) -> None:
    """Each batch of `map` counts its texts anew, so one number by itself tells nothing."""
    assert (pieces_by(pieces(of)) is not None) == found
    if of:
        data = Dataset.from_list(pieces(of))
        assert (pieces_by(data) is not None) == found
        shuffled = data.select([*range(0, len(of), 2), *range(1, len(of), 2)])
        assert (pieces_by(shuffled) is not None) == found
        assert pieces_by(data.remove_columns("overflow_to_sample_mapping")) is None


def cut(text: list[int], length: int, stride: int, begin: list[int], end: list[int], pad: int) -> Rows:
    """As tokenizers cut the second of two texts, or the only one."""
    room = length - len(begin) - len(end)
    found = [begin + text[i : i + room] + end for i in range(0, len(text) - stride, room - stride)]
    return [{"input_ids": row + [pad] * (length - len(row))} for row in found]


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
@pytest.mark.parametrize(
    ("stride", "begin", "end", "found"),
    [(24, [1, 7, 8, 2], [2], True), (24, [1], [2], True), (24, [], [], True), (0, [1, 7, 8, 2], [2], False)],
)
def test_pieces_that_overlap_are_told_without_a_column(
    kind: Any, stride: int, begin: list[int], end: list[int], found: bool
) -> None:
    """What prepares question answering takes the column out (`run_qa.py`)."""
    draw = random.Random(0)
    texts = [[draw.randrange(9, 500) for _ in range(draw.randint(20, 90))] for _ in range(8)]
    data = kind([row for text in texts for row in cut(text, 50, stride, begin, end, 0)])
    assert (pieces_by(data) == "one begins as another one ends") == found


def test_rows_that_are_alike_are_no_pieces() -> None:
    """Copies, one word for all, what begins or ends alike, and a row with nothing between."""
    same = [*range(9, 40)]
    for one, other in (
        (same, same),
        ([5] * 30, [5] * 40),
        ([*same, 50], [*same, 51]),
        ([6, *same], [7, *same]),
        ([1, 6, *same, 2], [1, *same, 2]),
    ):
        assert pieces_by([{"input_ids": one}, {"input_ids": other}]) is None
    assert pieces_by([{"input_ids": torch.arange(30)}, {"input_ids": None}, {}, "text"]) is None


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("unit", [None, "text"])
@pytest.mark.slow
def test_failure_86_pieces_of_texts_are_warned_of_once_unless_there_are_units(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own_loop: bool, unit: str | None
) -> None:
    data = Dataset.from_list([{**row, "text": row["overflow_to_sample_mapping"]} for row in pieces([0, 0, 1, 2] * 12)])
    privacy = private(**({} if unit is None else {"unit": unit, "max_examples_per_unit": 2, "target_delta": 1e-3}))
    if own_loop:
        sizes = {"expected_batch_size": 2, "micro_batch_size": 2, "steps": 1}
        PrivateRun(classifier(), data, privacy, pad, **sizes)
    else:
        changes = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "max_steps": 1}
        make(tmp_path, privacy=privacy, parts={"train_dataset": data}, **changes).train()
    assert caplog.text.count("pieces of one text") == (unit is None)
