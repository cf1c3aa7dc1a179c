"""What a row becomes does not follow from how many rows, or batches, came before it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.first_seen import check_order
from hf_dp.errors import ConfigurationError
from tests.training.refusing import refused
from tests.training.workbench import pad, rows

ROWS = rows()
WORDS = "makes another row of an example when a number that it keeps, and changes as it goes, is another"


class Counting(torch.utils.data.Dataset[Any]):
    """Cuts rows less, the more were read."""

    def __init__(self) -> None:
        self.data, self.read = ROWS, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return {**self.data[i], "input_ids": self.data[i]["input_ids"][: 2 + self.read // 500]}


class UsedUp(Counting):
    """Cuts rows once a number of them has been read, which it counts downwards."""

    left = 10_000

    def __getitem__(self, i: int) -> Any:
        self.left -= 1
        return {**self.data[i], "input_ids": self.data[i]["input_ids"][: None if self.left > 0 else 2]}


class Later:
    """A collator that hides more, the more batches there were; counted in the object or its class."""

    batches = 0

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up

    def __call__(self, made: Any) -> Any:
        self.batches += 1
        share = 0.5 * min(1.0, self.batches / self.warm_up)
        return pad(
            [{**row, "input_ids": [1 if random.random() < share else i for i in row["input_ids"]]} for row in made]
        )


def counting_in_a_closure() -> Any:
    read = 0

    def transform(rows: Any) -> Any:
        nonlocal read
        read += len(rows["labels"])
        return {**rows, "input_ids": [ids[: 2 + read // 500] for ids in rows["input_ids"]]}

    return datasets.Dataset.from_list(ROWS).with_transform(transform)


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [(Counting(), pad), (UsedUp(), pad), (ROWS, Later(100_000)), (counting_in_a_closure(), pad)],
    ids=["a dataset", "a dataset, downwards", "a collator", "a transform"],
)
def test_failure_124_how_many_came_before_decides_what_a_row_becomes(dataset: Any, collate: Any) -> None:
    with pytest.raises(ConfigurationError, match=WORDS):
        check_order(dataset, LogicalBatchCollator(4, collate))


def test_failure_124_in_a_training(tmp_path: Path) -> None:
    parts = {"data_collator": Later(100_000)}
    refused(tmp_path, ConfigurationError, WORDS, at_once=False, parts=parts)


class Harmless(Counting):
    """Counts what it has read, knows which row was the last, and holds the part of the data that it lies in."""

    part, place, last, length = None, -1, -1, None

    def __getitem__(self, i: int) -> Any:
        self.read, self.last = self.read + 1, i
        if self.part is None or self.place != i // 8:
            self.place, self.part = i // 8, self.data[i // 8 * 8 :][:8]
        self.length = self.length or max(len(row["input_ids"]) for row in self.data)
        return {**self.part[i % 8], "input_ids": self.part[i % 8]["input_ids"][: self.length]}


def test_a_number_that_no_row_follows_from_may_change() -> None:
    class Told(Later):
        def __call__(self, made: Any) -> Any:
            self.batches += 1
            return pad(made)

    check_order(Harmless(), LogicalBatchCollator(4, Told(1)))


def test_a_number_that_steps_set_may_decide() -> None:
    class BySteps(Later):
        """Which a callback sets."""

        step = 0

        def __call__(self, made: Any) -> Any:
            return pad([{**row, "input_ids": row["input_ids"][: 2 + self.step // 10]} for row in made])

    check_order(ROWS, LogicalBatchCollator(4, BySteps(1)))


class Stream(Counting):
    """Reads rows one after the other, and begins again for one that was before."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = iter(self.data)

    def __getitem__(self, i: int) -> Any:
        if i < self.read:
            self.rows, self.read = iter(self.data), 0
        for _ in range(i - self.read):
            next(self.rows)
        self.read = i + 1
        return next(self.rows)


def test_where_a_stream_stands_is_no_count() -> None:
    data = Stream()
    check_order(data, LogicalBatchCollator(4, pad))
    assert [data[i] for i in (3, 5, len(ROWS) - 1, 0)] == [ROWS[i] for i in (3, 5, -1, 0)]


class UsedUpBesideAStream(UsedUp):
    def __init__(self) -> None:
        super().__init__()
        self.rows = iter(self.data)


def test_a_count_beside_a_stream_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=WORDS):
        check_order(UsedUpBesideAStream(), LogicalBatchCollator(4, pad))
