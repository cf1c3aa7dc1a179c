"""Rows that are windows over one series are told by the numbers that neighbours share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import Subset

from hf_dp.data.overlapping_rows import overlapping_by
from tests.training.workbench import make, private, rows

LENGTH = 16
SERIES = torch.randn(200, generator=torch.Generator().manual_seed(0))
Kind = Callable[[torch.Tensor], Any]


class Windows(torch.utils.data.Dataset[Any]):
    def __init__(self, series: torch.Tensor, stride: int = 1, kind: Kind = torch.clone) -> None:
        self.series, self.stride, self.kind = series, stride, kind

    def __len__(self) -> int:
        return (len(self.series) - LENGTH) // self.stride + 1

    def __getitem__(self, i: int) -> dict[str, Any]:
        part = self.series[i * self.stride :][:LENGTH]
        return {"past_values": self.kind(part), "labels": i % 2}


@pytest.mark.parametrize("kind", [torch.clone, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.bfloat16])
@pytest.mark.parametrize(("stride", "overlap"), [(1, True), (5, True), (LENGTH, False)])
def test_failure_120_windows_that_overlap_are_told(kind: Kind, stride: int, overlap: bool) -> None:
    made = Windows(SERIES, stride, kind)
    found = "past_values" if overlap else None
    assert overlapping_by(made) == found
    assert overlapping_by([made[i] for i in range(4)]) == found
    assert overlapping_by(Subset(made, [7, 2, 1, 0])) == found
    assert overlapping_by([tuple(made[i].values()) for i in range(4)]) == (0 if overlap else None)


def test_failure_120_of_several_series_at_once_and_in_a_dataset() -> None:
    both = Windows(torch.stack([SERIES, SERIES.flip(0)], 1), 4)
    assert overlapping_by(both) == "past_values"
    made = Dataset.from_list(
        [{**row, "past_values": row["past_values"].tolist()} for row in map(both.__getitem__, range(6))]
    )
    assert overlapping_by(made) == overlapping_by(made.shuffle(seed=1).with_format("torch")) == "past_values"
    assert overlapping_by(made.with_transform(lambda batch: batch)) == "past_values"


@pytest.mark.parametrize(
    "row",
    [
        lambda i: torch.arange(i, i + LENGTH) % 4,
        lambda i: torch.zeros(28, 28).index_fill(0, torch.tensor([i]), 1.0),
        lambda i: SERIES[:LENGTH],
        lambda i: SERIES[i * LENGTH :][:LENGTH],
        lambda i: np.array(["a", "b"]),
        lambda i: [[1.0], [2.0, 3.0]],
        lambda i: torch.tensor(1.0),
        lambda i: [],
    ],
)
def test_what_is_periodic_or_alike_or_no_series_is_no_window(row: Callable[[int], Any]) -> None:
    assert overlapping_by([{"x": row(i)} for i in range(4)]) is None


def test_a_row_that_cannot_be_read_tells_nothing() -> None:
    class Broken(Windows):
        def __getitem__(self, i: int) -> dict[str, Any]:
            raise LookupError(i)

    assert overlapping_by(Broken(SERIES)) is None


@pytest.mark.usefixtures("checked_once")
def test_failure_120_the_trainer_says_whom_a_promise_to_windows_is_made_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = rows(30)
    windows = [{**row, "past_values": Windows(SERIES, 2)[i]["past_values"]} for i, row in enumerate(plain)]
    own = [{**row, "user": i // 2} for i, row in enumerate(windows)]
    by_user = private(unit="user", max_examples_per_unit=2)
    for number, (data, privacy) in enumerate([(plain, private()), (own, by_user), (windows, private())]):
        assert "windows over one series" not in caplog.text
        parts = {"train_dataset": data}
        make(tmp_path / str(number), privacy=privacy, parts=parts).get_train_dataloader()
    assert "windows over one series" in caplog.text


def test_chosen_windows_that_do_not_overlap_are_left_alone() -> None:
    made = Windows(SERIES, LENGTH // 4, torch.Tensor.tolist)
    every = list(range(0, len(made), 4))
    assert overlapping_by(Subset(made, every)) is None
    data = Dataset.from_list([made[i] for i in range(len(made))])
    assert overlapping_by(data) == "past_values"
    assert overlapping_by(data.select(every)) is overlapping_by(Subset(data, every[::-1])) is None


@pytest.mark.parametrize("begin", [0.0, None])
def test_long_rows_that_rest_on_one_number_are_told_apart_at_once(begin: float | None) -> None:
    """Each place of silence might be where the next row begins."""
    numbers = torch.randn(4, 1 << 19, generator=torch.Generator().manual_seed(0))
    numbers[:, 1 << 18 :] = 0.0 if begin is None else begin
    numbers[:, : 1 << 10] = 0.0
    assert overlapping_by([{"x": row} for row in numbers]) is None
    series = torch.cat([numbers[0, : 1 << 12], numbers[1, : 1 << 12]])
    assert overlapping_by([{"x": series[i : i + 4096]} for i in range(0, 4096, 1024)]) == "x"
