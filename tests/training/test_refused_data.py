"""Training data that cannot be sampled or read is refused by name, wherever the bad row is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError
from tests.architectures import VOCABULARY
from tests.training.refusing import refused
from tests.training.workbench import Rows, make, pad, rows


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


class Counts(torch.utils.data.Dataset[Any]):
    """Has 48 rows, and says something else."""

    def __init__(self, *said: Any) -> None:
        self.rows, self.said = rows(), list(said)

    def __len__(self) -> int:
        said: int = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        return said

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


BAD_DATA: dict[str, tuple[Callable[[], Any], str]] = {
    "none of it": (list, "0 examples"),
    "fewer than the expected batch": (lambda: rows(7), "an expected batch of 8 from a training dataset of 7"),
    "one example": (lambda: rows(1), "1 examples"),
    "an iterable dataset of torch": (Streamed, "Streamed, which can only be iterated"),
    "a streamed dataset": (lambda: datasets.Dataset.from_list(rows()).to_iterable_dataset(), "IterableDataset"),
    "a loader of batches": (
        lambda: torch.utils.data.DataLoader(rows(), batch_size=4),
        "DataLoader, which draws",
    ),
    "a generator": (lambda: iter(rows()), "which can only be iterated"),
    "a name": (lambda: "ag_news", "is the text 'ag_news'"),
    "a set": (lambda: {1, 2, 3}, "which can only be iterated"),
    "fewer rows than it says": (lambda: Counts(100), "Counts, whose last example cannot be read"),
    "a length that changes": (lambda: Counts(48, 40), "whose length was 48 and then 40"),
    "a length below zero": (lambda: Counts(-1), "Counts, whose last example cannot be read"),
    "a length that is no number": (lambda: Counts("48"), "Counts, whose last example cannot be read"),
    "a length beyond counting": (lambda: Counts(10**400), "Counts, whose last example cannot be read"),
    "all splits at once": (
        lambda: datasets.DatasetDict(train=datasets.Dataset.from_list(rows())),
        "DatasetDict with the keys train",
    ),
}


@pytest.mark.parametrize("steps", [4, -1])
@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_training_data(tmp_path: Path, name: str, steps: int) -> None:
    data, words = BAD_DATA[name]
    refused(tmp_path, ConfigurationError, words, parts={"train_dataset": data()}, max_steps=steps)


def test_a_pandas_table_is_told_how_it_becomes_a_dataset(tmp_path: Path) -> None:
    parts = {"train_dataset": pd.DataFrame({"labels": [0] * 48})}
    error = refused(tmp_path, ConfigurationError, "DataFrame, whose last example cannot be read", parts=parts)
    assert "from_pandas" in error.fix


def test_the_columns_that_a_slice_of_a_dataset_is(tmp_path: Path) -> None:
    parts = {"train_dataset": datasets.Dataset.from_list(rows())[:9]}
    error = refused(tmp_path, ConfigurationError, "dict with the keys input_ids, labels", parts=parts)
    assert "data.select(" in error.fix


def test_a_single_row_of_its_own(tmp_path: Path) -> None:
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "parts": {"train_dataset": rows(1)}}
    refused(tmp_path, ConfigurationError, "n=1 training examples, and no delta", **one)


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows on which a training goes through."""
    many = rows(2000)
    path = tmp_path_factory.mktemp("fine")
    assert make(path, parts={"train_dataset": datasets.Dataset.from_list(many)}).train().global_step
    return many


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"labels": 3}, "Target 3 is out of bounds"),
        ({"labels": -1}, "Target -1 is out of bounds"),
        ({"input_ids": [5, VOCABULARY]}, "index out of range"),
        ({"input_ids": [5, -7]}, "index out of range"),
        ({"input_ids": [5] * 3000}, "size of tensor"),
        ({"labels": None}, "TypeError"),
    ],
)
@pytest.mark.slow
def test_one_bad_row_that_is_drawn_late(tmp_path: Path, fine: Rows, bad: dict[str, Any], words: str) -> None:
    many = copy.deepcopy(fine)
    many[1501] |= bad
    data = datasets.Dataset.from_list(many)
    refused(tmp_path, ConfigurationError, f"row 1501 .*{words}", at_once=False, parts={"train_dataset": data})


def test_rows_without_labels(tmp_path: Path) -> None:
    data = [{"input_ids": row["input_ids"]} for row in rows()]
    refused(tmp_path, ConfigurationError, "no 'labels'", parts={"train_dataset": data}, at_once=False)


@pytest.mark.slow
def test_a_column_that_is_dropped_before_a_loss_of_ones_own_reads_it(tmp_path: Path) -> None:
    class Weighted(DPTrainer):
        def compute_per_example_loss(self, model: Any, inputs: Any) -> Any:
            weights = inputs.pop("weight")
            return weights * super().compute_per_example_loss(model, inputs)

    def weighted(examples: Rows) -> dict[str, Any]:
        weights = {"weight": torch.tensor([e["weight"] for e in examples])} if "weight" in examples[0] else {}
        return pad(examples) | weights

    data = [row | {"weight": 0.5} for row in rows()]
    parts = {"train_dataset": data, "data_collator": weighted}
    given: dict[str, Any] = {"kind": Weighted, "parts": parts, "at_once": False}
    error = refused(tmp_path, ConfigurationError, "KeyError: 'weight'", **given)
    assert "remove_unused_columns=False" in error.fix
    assert make(tmp_path, kind=Weighted, parts=parts, remove_unused_columns=False).train().global_step
