"""Rows that a transform, or a class, makes of other rows of the training data, in tables of `datasets`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from hf_dp.data.mixing_dataset import check_dataset
from hf_dp.errors import ConfigurationError
from tests.training.refusing import refused
from tests.training.workbench import make, pad, rows

Rows = dict[str, list[Any]]
TABLE = datasets.Dataset.from_list([{**row, "place": i} for i, row in enumerate(rows())])
PUBLIC = datasets.Dataset.from_list(rows(60, seed=1))
BOTH = datasets.Dataset.from_list(rows(80)).train_test_split(test_size=0.4, seed=0)


def beside(pick: Callable[[int], list[int]], of: Callable[[int], dict[str, Any]]) -> Callable[[Rows], Rows]:
    """A transform that puts the first of other rows before each."""

    def transform(batch: Rows) -> Rows:
        others = [pick(i) for i in batch.get("place", [0] * len(batch["labels"]))]
        ids = [
            sum((of(i)["input_ids"][:1] for i in few), ids) for few, ids in zip(others, batch["input_ids"], strict=True)
        ]
        return {"input_ids": ids, "labels": batch["labels"]}

    return transform


def any_of(n: int) -> Callable[[int], list[int]]:
    return lambda i: [random.randrange(n)]


MIXED = {
    "a row": lambda i: TABLE[i],
    "several": lambda i: {"input_ids": TABLE[[i, i - 1]]["input_ids"][0]},
    "a column": lambda i: {"input_ids": TABLE["input_ids"][i]},
    "shuffled": lambda i: TABLE.shuffle(seed=1)[i],
    "of some columns": lambda i: TABLE.select_columns(["input_ids"])[i],
}


@pytest.mark.parametrize("read", MIXED.values(), ids=MIXED)
def test_failure_123_a_transform_that_reads_other_rows_at_random_is_refused(read: Any) -> None:
    with pytest.raises(ConfigurationError, match="Dataset by its transform makes a row of its own data and of other"):
        check_dataset(TABLE.with_transform(beside(any_of(len(TABLE)), read)))


def test_failure_123_of_some_of_the_rows() -> None:
    mixed = TABLE.with_transform(beside(any_of(len(TABLE)), MIXED["a row"]))
    with pytest.raises(ConfigurationError, match="and of other rows"):
        check_dataset(torch.utils.data.Subset(mixed, range(1, len(TABLE))))


class Global(torch.utils.data.Dataset[Any]):
    """Reads a table that it does not hold."""

    def __len__(self) -> int:
        return len(TABLE)

    def __getitem__(self, i: int) -> Any:
        other = TABLE[random.randrange(len(TABLE))]["input_ids"]
        return {"input_ids": TABLE[i]["input_ids"] + other[:1], "labels": TABLE[i]["labels"]}


def test_failure_123_a_class_that_reads_a_table_that_it_does_not_hold() -> None:
    with pytest.raises(ConfigurationError, match="Global makes a row of its own data and of other rows"):
        check_dataset(Global())


def test_failure_123_the_trainer_refuses_before_anything_is_spent(tmp_path: Path) -> None:
    mixed = TABLE.with_transform(beside(any_of(len(TABLE)), MIXED["a row"]))
    refused(
        *(tmp_path, ConfigurationError, "and of other rows"),
        at_once=False,
        parts={"train_dataset": mixed},
        remove_unused_columns=False,
    )


def before_each(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collator that reads the row before."""
    return pad([{**row, "input_ids": TABLE[row["place"] - 1]["input_ids"][:1] + row["input_ids"]} for row in rows])


def told(path: Path, dataset: datasets.Dataset, collate: Any = pad) -> None:
    trainer = make(
        path, parts={"train_dataset": dataset, "data_collator": collate}, remove_unused_columns=False, max_steps=1
    )
    trainer.train()


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [(TABLE.with_transform(beside(lambda i: [i - 1], MIXED["a row"])), pad), (TABLE, before_each)],
    ids=["by a transform", "by the collator"],
)
def test_failure_123_rows_of_always_the_same_others_are_warned_of(
    dataset: datasets.Dataset, collate: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told(tmp_path, dataset, collate)
    assert caplog.text.count("is made of its own and of other rows, which its transform, or the collator, reads") == 1


@pytest.mark.parametrize(
    "own",
    [
        TABLE.with_transform(beside(lambda i: [i], MIXED["a row"])),
        TABLE.with_transform(beside(any_of(len(PUBLIC)), lambda i: PUBLIC[i])),
        BOTH["train"].with_transform(beside(any_of(len(BOTH["test"])), lambda i: BOTH["test"][i])),
        TABLE,
    ],
    ids=["its own row", "public rows", "rows that nobody trains on", "no transform"],
)
def test_what_is_no_other_row_of_the_training_data_is_read(
    own: datasets.Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_dataset(own)
    told(tmp_path, own)
    assert "of other rows" not in caplog.text
