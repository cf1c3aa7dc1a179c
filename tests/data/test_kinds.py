"""A row of another type decides nothing about those beside it."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding, default_data_collator

from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.kinds import kind_of
from hf_dp.data.loader import _OwnReads
from hf_dp.errors import ConfigurationError
from tests.training.workbench import a_tokenizer, classifier, make, rows

pytestmark = pytest.mark.usefixtures("checked_once")


class Unscanned(torch.utils.data.Dataset[Any]):
    """Neither a list nor a Dataset: its columns are not known before its rows are read."""

    def __init__(self, held: list[Any]) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, i: int) -> Any:
        return self._held[i]


def scores(whole: int) -> list[dict[str, Any]]:
    """As of a file in JSON: 2.75 everywhere, and once 3."""
    data = [{"input_ids": row["input_ids"][:4], "label": 2.75} for row in rows(300, low=4, high=4)]
    data[whole]["label"] = 3
    return data


@pytest.mark.parametrize("whole", [0, 9, 17, 150, 299])
def test_failure_60_one_whole_number_does_not_cut_the_labels_beside_it(tmp_path: Path, whole: int) -> None:
    model = classifier(num_labels=1, problem_type="regression")
    trainer = make(tmp_path, model, parts={"train_dataset": scores(whole), "data_collator": default_data_collator})
    with pytest.raises(ConfigurationError, match="makes 'labels' of a row otherwise when rows of other types"):
        trainer.train()
    assert not trainer.ledger.entries


@pytest.mark.slow
def test_failure_60_where_columns_are_not_known_it_is_refused_when_it_comes(tmp_path: Path) -> None:
    model = classifier(num_labels=1, problem_type="regression")
    data = Unscanned(scores(whole=17))
    trainer = make(
        tmp_path, model, parts={"train_dataset": data, "data_collator": default_data_collator}, max_steps=200,
        per_device_train_batch_size=50,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="makes 'labels' of a row otherwise when rows of other types"):
        trainer.train()
    assert trainer.ledger.steps < 200


def test_failure_60_the_check_can_fail() -> None:
    """What the collator does, unasked."""
    data = scores(whole=0)[:3]
    assert default_data_collator([{"label": row["label"]} for row in data])["labels"].tolist() == [3, 2, 2]


@pytest.mark.parametrize(
    ("few", "name"),
    [
        ([{"x": 1.0, "label": 3}, {"x": 1.0, "label": 2.75}], "labels"),
        ([{"x": 1.0, "label": 2.75}, {"x": 1.0, "label": 3}], "labels"),
        ([{"x": [1, 2]}, {"x": [1, 2.5]}], "x"),
        ([{"x": 1.0}, {"x": 1.0, "more": 5}], "more"),
        ([{"x": 1.0, "more": None}, {"x": 1.0, "more": 5}], "more"),
        ([{"x": True}, {"x": 2}], "x"),
        ([{"x": 1.0, "label_ids": [3, 2.6, 0]}, {"x": 1.0, "label_ids": [3.1, 2.6, 0]}], "labels"),
    ],
)
def test_what_the_first_row_decides_is_refused(few: list[Any], name: str) -> None:
    collator = LogicalBatchCollator(2, default_data_collator)
    with pytest.raises(ConfigurationError, match=f"makes '{name}' of a row otherwise"):
        collator.collated(few)


@pytest.mark.parametrize(
    "few",
    [
        [{"x": 1.0, "note": None}, {"x": 2.0, "note": "text"}],
        [{"x": 1.0}, {"x": 2.0, "note": "text"}],
        [{"x": 1.0, "note": 3}, {"x": 2.0, "note": "text"}, {"x": 2.0, "note": 2.75}],
        [{"x": np.float32(1)}, {"x": np.float32(2)}],
        [{"x": [1, 2]}, {"x": [3, 4]}],
    ],
)
def test_what_changes_nothing_is_not(few: list[Any]) -> None:
    def collate(rows: list[Any]) -> Any:
        return {"x": torch.tensor(np.array([row.pop("x") for row in rows]))}

    LogicalBatchCollator(4, collate).collated([dict(row) for row in few])


def test_what_is_drawn_at_random_is_no_other_row() -> None:
    def collate(rows: list[Any]) -> Any:
        return {"x": torch.tensor([row["x"] for row in rows]) + torch.rand(len(rows))}

    LogicalBatchCollator(4, collate).collated([{"x": 1.0, "note": None}, {"x": 2.0, "note": "text"}])


def test_failure_60_each_micro_batch_is_looked_at() -> None:
    """Where cutting changes nothing, it was no harm; it is with other numbers."""

    def collate(rows: list[Any]) -> Any:
        return {"x": torch.tensor(np.array([row["x"] for row in rows], dtype=type(rows[0]["x"]))).float()}

    collator = LogicalBatchCollator(4, collate)
    collator.collated([{"x": 3}, {"x": 2.0}])
    with pytest.raises(ConfigurationError, match="makes 'x' of a row otherwise"):
        collator.collated([{"x": 3}, {"x": 3.5}])


def test_failure_60_of_what_is_said_of_the_whole_batch() -> None:
    def collate(rows: list[Any]) -> Any:
        return {"x": torch.tensor([row["x"] for row in rows]), "is_long": any("more" in row for row in rows)}

    collator = LogicalBatchCollator(4, collate)
    collator.collated([{"x": 1.0}, {"x": 2.0}])
    with pytest.raises(ConfigurationError, match="makes 'is_long' of a row otherwise"):
        collator.collated([{"x": 1.0}, {"x": 2.0, "more": 1}])


def test_failure_60_of_rows_that_are_objects() -> None:
    @dataclasses.dataclass
    class Row:
        x: float
        label: float

    with pytest.raises(ConfigurationError, match="makes 'labels' of a row otherwise"):
        LogicalBatchCollator(4, default_data_collator).collated([Row(1.0, 3), Row(1.0, 2.75)])


def test_failure_60_of_padded_rows() -> None:
    def collate(rows: list[Any]) -> Any:
        longest = max(len(row["x"]) for row in rows)
        made = np.zeros((len(rows), longest), dtype=np.array(rows[0]["x"]).dtype)
        for i, row in enumerate(rows):
            made[i, : len(row["x"])] = row["x"]
        return {"x": torch.tensor(made).float()}

    collator = LogicalBatchCollator(4, collate)
    collator.collated([{"x": [1.5, 2.5]}, {"x": [3, 4, 5]}])
    with pytest.raises(ConfigurationError, match="makes 'x' of a row otherwise"):
        collator.collated([{"x": [3, 4, 5]}, {"x": [1.5, 2.5]}])


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_failure_62_a_formatted_dataset_is_read_row_by_row(kind: str) -> None:
    """A column of numbers of which one is missing would be of floats, and large numbers be rounded."""
    large = 2**53 + 1
    data = Dataset.from_list([{"at": large}, {"at": None}, {"at": large}]).with_format(kind)
    read = _OwnReads(data, nullcontext)
    assert int(read.__getitems__([0, 1, 2])[0]["at"]) == large


@pytest.mark.parametrize(
    ("few", "words"),
    [
        ([{"x": 1.0}, {"x": "one"}], r"fails on a row by itself \(.*\): x is str"),
        ([{"x": [1, 2]}, {"x": [1]}], "fails on 2 examples together"),
        ([{"x": 1.0, "more": 1}, {"x": 1.0}], "fails on 2 examples of other columns or types together"),
    ],
)
def test_what_a_collator_fails_on_is_named(few: list[Any], words: str) -> None:
    def collate(rows: list[Any]) -> Any:
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    with pytest.raises(ConfigurationError, match=words):
        LogicalBatchCollator(2, collate).collated(few)


@pytest.mark.parametrize("padded", [DataCollatorWithPadding(a_tokenizer({"a"})), default_data_collator])
def test_a_collator_that_takes_dicts_is_blamed_for_rows_that_are_tuples(padded: Any) -> None:
    few = [([1, 2], 0), ([1], 1)]
    with pytest.raises(ConfigurationError, match="by itself .*: it is tuple") as caught:
        LogicalBatchCollator(2, padded).collated(few)
    assert "lambda rows" in caught.value.fix


def test_kinds() -> None:
    assert kind_of({"a": 1, "b": [1, 2]}) == kind_of({"b": [3], "a": 2})
    assert kind_of({"a": 1}) != kind_of({"a": 1.0})
    assert kind_of({"a": True}) != kind_of({"a": 1})
    assert kind_of({"a": [[1], [2]]}) != kind_of({"a": [[1], [2.0]]})
    assert kind_of((1, "x")) != kind_of((1.0, "x"))
    assert kind_of({"a": torch.ones(2)}) != kind_of({"a": torch.ones(2, dtype=torch.long)})
    assert kind_of({"a": {"b": 1}}) != kind_of({"a": {"b": "c"}})
