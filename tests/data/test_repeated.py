"""Rows that are one row several times are told by where they lie, and warned of; rows that are alike are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, concatenate_datasets, interleave_datasets
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import Dataset as DatasetOfTorch

from hf_dp.data import repeated
from hf_dp.data.repeated import are_in_both, warn_of_repeated
from tests.training.workbench import make, private, rows

FEW, MANY = (Dataset.from_list([{"x": i, "text": "a"} for i in range(n)]) for n in (4, 10))
LISTED = [{"x": 1}, {"x": 1}, {"x": 2}]
WORDS = "%s of the %s rows of the training data are another one once more, and one is there %s times"


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (MANY.select([0, 0, 1, 0]), (2, 4, 3)),
        (interleave_datasets([MANY, FEW], stopping_strategy="all_exhausted"), (6, 20, 3)),
        (concatenate_datasets([FEW, MANY, FEW]), (4, 18, 2)),
        (concatenate_datasets([MANY.select(range(6)), MANY.select(range(5, 8))]).shuffle(), (1, 9, 2)),
        (Subset(MANY, [1, 2, 1]), (1, 3, 2)),
        (ConcatDataset([Subset(LISTED, [0, 1]), LISTED]), (2, 5, 2)),
        (3 * LISTED, (6, 9, 3)),
    ],
)
def test_one_row_several_times(dataset: Any, said: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    warn_of_repeated(dataset)
    assert [record.getMessage()[: len(WORDS % said)] for record in caplog.records] == [WORDS % said]


class Endless(DatasetOfTorch[Any]):
    """Rows of any number, and of no length."""

    def __getitem__(self, i: int) -> Any:
        return {"x": i}


NOTHING = [Dataset.from_dict({"x": [None] * 5, "y": range(i, i + 5)}) for i in (0, 5)]


@pytest.mark.parametrize(
    "dataset",
    [
        concatenate_datasets(NOTHING),
        concatenate_datasets([one.select_columns("x") for one in NOTHING]),
        Subset(Endless(), [1, 10**6, 2]),
        FEW,
        LISTED,
        [],
        ["a", "a"],
        Dataset.from_dict({}),
        Dataset.from_dict({"x": []}),
        concatenate_datasets([MANY, FEW, Dataset.from_dict({"x": [None, None]})]).shuffle(),
        concatenate_datasets([MANY.select(range(5)), MANY.select(range(5, 8))]),
        interleave_datasets([MANY, FEW]),
        MANY.train_test_split(0.5)["train"],
        ConcatDataset([Subset(LISTED, [0, 1]), FEW]),
    ],
)
def test_rows_that_are_there_once(dataset: Any, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_repeated(dataset)
    assert not caplog.records


def test_columns_of_nothing_are_in_no_two_datasets() -> None:
    for columns in (["x", "y"], ["x"]):
        one, other = (data.select_columns(columns) for data in NOTHING)
        assert not are_in_both(one, other)
        assert are_in_both(one, one.select([1]) if "y" in columns else one)


def test_lists_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "_BITS", 62)  # as if there were millions of them
    assert not are_in_both([{} for _ in range(9)], [{} for _ in range(9)])
    assert are_in_both(LISTED, [{}, LISTED[2]])


@pytest.mark.parametrize(
    "secret", [{"sampling_probability": 0.1, "target_delta": 1e-3}, {"withhold_non_private_logs": True}]
)
def test_what_is_secret_is_not_counted(secret: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, privacy=private(**secret), parts={"train_dataset": 2 * rows()}).get_train_dataloader()
    found = [record.getMessage() for record in caplog.records if "another one once more" in record.getMessage()]
    assert [text[: text.index(" (by")] for text in found] == ["Rows of the training data are another one once more"]


def test_of_units_it_is_no_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for unit in (None, "whose"):
        privacy = private(unit=unit, max_examples_per_unit=None if unit is None else 2)
        data = Dataset.from_list([{**row, "whose": i} for i, row in enumerate(rows())]).select([0, 0, *range(1, 48)])
        data = data if unit else data.remove_columns("whose")
        caplog.clear()
        make(tmp_path / str(unit), privacy=privacy, parts={"train_dataset": data}).get_train_dataloader()
        assert ("max_examples_per_unit=2" in caplog.text) == (unit is None)
