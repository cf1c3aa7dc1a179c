from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_dp.data.held_rows as held_rows
from hf_dp import DPTrainer
from hf_dp.data.widths import widths_of
from hf_dp.errors import PreflightError
from tests.training.refusing import refused
from tests.training.workbench import rows


def test_rows_between_those_that_were_held_leave_another_rest_by_four() -> None:
    def between(lengths: list[int], held: list[int]) -> list[int]:
        rows = [torch.zeros(n) for n in lengths]
        ends = [next(row for row in rows if len(row) == n) for n in held]
        return [len(row) for row in held_rows._rows_between(rows, lambda row: widths_of({"ids": row[None]}), ends)]

    assert between([4, 5, 6, 7, 8, 9, 10, 12], [4, 12]) == [5, 6, 10], "and one beside which four more are"
    assert between([16, 4, 7, 8, 10, 11, 12], [4, 16]) == [7, 10, 16], "one of each rest"
    assert between([4, 8, 12], [4, 12]) == between([4, 4], [4, 4]) == [], "nothing that was not held"
    assert between([4, 7, 8], [4, 8]) == [7, 8]
    assert between([4, 8, 11], [4, 8, 11]) == [], "nothing is wider"


def test_rows_between_have_the_rests_of_each_axis() -> None:
    """Lengths of labels, of which there are many, leave room for those of what is heard."""
    pairs = [(8, 4), (8, 5), (8, 6), (8, 7), (8, 9), (9, 9), (10, 9), (40, 12)]
    rows = [torch.zeros(n, m) for n, m in pairs]
    found = held_rows._rows_between(
        rows, lambda row: widths_of({"sound": row[None, :, 0], "labels": row[None, 0]}), [rows[0], rows[-1]]
    )
    assert [row.shape for row in found[:-1]] == [(8, 6), (9, 9)]


def test_one_row_is_held_against_rows_with_other_labels_of_each_column() -> None:
    def compared(rows: list[Any], others: list[Any]) -> list[list[Any]]:
        calls: list[list[Any]] = []

        def compare(rows: list[Any], number: int) -> list[float]:
            calls.append([rows[:number], rows[number:]])
            return [1.0] * number

        held_rows.hold(rows, others, lambda row: {("ids", 0): row["n"]}, compare)
        return calls[1:]

    first, second = {"n": 1, "labels": 0}, {"n": 1, "labels": 0}
    assert compared([first, second], []) == [], "no others"
    one, two, three = ({"n": 1, "labels": label} for label in (3, torch.tensor(4), True))
    assert compared([first, second], [one, two, one, dict(one), three]) == [
        [[first], [three, two]],
        [[first], [one]],
    ]
    many = [{"n": 1 + i % 2, "labels": 0, "id": i} for i in range(9)]
    held = [other for _, others in compared(many, [{**one, "id": 0}])[-2:] for other in others]
    assert held == [many[1], {**one, "id": 0}, many[8], many[2]], "the least, the greatest, the narrowest"
    numbered = [{"n": 1, **{f"id {c}": i + c for c in range(6)}, "labels": int(i == 5)} for i in range(9)]
    assert compared(numbered[:1], numbered)[0][1][0] == numbered[5], "first the column with the fewest numbers"
    told = [{"n": 1, "labels": 0.5}, {"n": 1, "labels": torch.ones(2, dtype=torch.long)}, {"n": 1, "labels": "a"}]
    assert compared([first], told) == [], "no whole numbers"


class Rare(DPTrainer):
    """All losses of a micro-batch follow from whether a label is there that one row has."""

    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        losses: Tensor = super().compute_per_example_loss(model, inputs)
        return losses * 2 if inputs["labels"].eq(2).any() else losses


@pytest.mark.slow
@pytest.mark.checked_anew
def test_failure_73_a_label_that_one_row_has_is_seen_on_devices_where_none_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_dp.per_example.waiting._AT_ONCE", frozenset())
    given = [{**row, "labels": 2 if i == 17 else i % 2} for i, row in enumerate(rows(low=6, high=6))]
    words = "follows from what is beside it in a batch"
    refused(tmp_path, PreflightError, words, at_once=False, kind=Rare, parts={"train_dataset": given})
