"""Datasets that make a row of other rows, chosen at random, are refused; random choices within a row are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch

from hf_dp.data.mixing_dataset import check_dataset
from hf_dp.errors import ConfigurationError
from tests.training.refusing import refused
from tests.training.workbench import make, rows

Row = dict[str, Any]
ROWS = rows()
IDS = [row["input_ids"] for row in ROWS]


class Rows(torch.utils.data.Dataset[Row]):
    """Of whatever container, read at a place."""

    def __init__(self, data: Any, read: Callable[[Any, int], Any] = lambda data, i: data[i]) -> None:
        self.data, self.read = data, read

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Row:
        return dict(self.read(self.data, i))


class Mixed(Rows):
    """Half of its own, half of another."""

    def __getitem__(self, i: int) -> Row:
        own, other = self.read(self.data, i), self.read(self.data, random.randrange(len(self.data)))
        return {"input_ids": [*own["input_ids"][:3], *other["input_ids"][:3]], "labels": own["labels"]}


class OfItself(Rows):
    """Now and then with another of its own rows, by torch's numbers."""

    def __getitem__(self, i: int) -> Row:
        own = super().__getitem__(i)
        if torch.rand(()) < 0.3:
            own["input_ids"] = own["input_ids"] + super().__getitem__(i)["input_ids"][:1]
            own["input_ids"] += Rows.__getitem__(self, int(torch.randint(len(self), ())))["input_ids"][:1]
        return own


class ByNumpy(Rows):
    def __getitem__(self, i: int) -> Row:
        own, other = self.data[i], self.data[np.random.randint(len(self.data))]
        return {"input_ids": [*own["input_ids"][:3], *other["input_ids"][:3]], "labels": own["labels"]}


class Recursive(Rows):
    """Reads itself."""

    is_other = False

    def __getitem__(self, i: int) -> Row:
        own = super().__getitem__(i)
        if not self.is_other and random.random() < 0.5:
            self.is_other = True
            own["input_ids"] = own["input_ids"] + self[random.randrange(len(self))]["input_ids"][:1]
            self.is_other = False
        return own


def at(data: Any, i: int) -> Any:
    return data.iloc[i]


MIXED = {
    "a list": Mixed(ROWS),
    "a dict": Mixed(dict(enumerate(ROWS))),
    "rows of its own class": OfItself(ROWS),
    "itself": Recursive(ROWS),
    "by numpy": ByNumpy(ROWS),
    "a dataset of Python's": Mixed(Rows(ROWS)),
    "a part of one": Mixed(torch.utils.data.Subset(Rows(ROWS), range(len(ROWS)))),
    "a dataset of Hugging Face's": Mixed(datasets.Dataset.from_list(ROWS)),
    "its columns": Mixed(
        datasets.Dataset.from_list(ROWS), lambda d, i: {"input_ids": d["input_ids"][i], "labels": d["labels"][i]}
    ),
    "a table": Mixed(pd.DataFrame(ROWS), at),
    "a column of a table": Mixed(
        pd.DataFrame(ROWS), lambda d, i: {"input_ids": d["input_ids"].iloc[i], "labels": d.loc[i, "labels"]}
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_failure_47_rows_of_other_rows_are_refused(case: str) -> None:
    with pytest.raises(ConfigurationError, match="makes a row of its own data and of other rows"):
        check_dataset(MIXED[case])


class Cropped(Rows):
    """A random part of its own row, in a random template, with words of a public vocabulary."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.order, self.templates = list(range(len(data)))[::-1], [[3], [4, 5], [6]]
        self.vocabulary = list(range(3, 20)) * 10

    def __getitem__(self, i: int) -> Row:
        row = self.data[self.order[i]]
        start = random.randrange(len(row["input_ids"]))
        ids = [*random.choice(self.templates), random.choice(self.vocabulary), *row["input_ids"][start:]]
        return {"input_ids": ids, "labels": row["labels"]}


class OfPairs(torch.utils.data.Dataset[Row]):
    """Each row is of two texts, always the same ones."""

    def __init__(self) -> None:
        self.pairs, self.texts = [(i, (7 * i + 3) % len(IDS)) for i in range(len(IDS))], IDS

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> Row:
        one, other = self.pairs[i]
        return {"input_ids": self.texts[one] + self.texts[other], "labels": i % 3}


class Typed(Rows):
    """Reads of nothing but its own kind of container."""

    def __getitem__(self, i: int) -> Row:
        assert type(self.data) is list
        return super().__getitem__(i)


OWN = [
    Rows(ROWS),
    Cropped(ROWS),
    OfPairs(),
    Typed(ROWS),
    Rows(pd.DataFrame(ROWS), at),
    ROWS,
    datasets.Dataset.from_list(ROWS),
]


@pytest.mark.parametrize("dataset", OWN, ids=lambda dataset: type(dataset).__name__)
def test_rows_of_their_own_are_welcome(dataset: Any) -> None:
    check_dataset(dataset)


def test_what_a_dataset_holds_open_stays_so(tmp_path: Path) -> None:
    class Closing(Rows):
        """Of a file that it closes."""

        def __init__(self) -> None:
            super().__init__(ROWS)
            self.file = (tmp_path / "rows").open("w+")

        def __del__(self) -> None:
            self.file.close()

    dataset = Closing()
    check_dataset(dataset)
    assert not dataset.file.closed


def test_failure_47_in_a_training(tmp_path: Path) -> None:
    words = "Mixed makes a row of its own data and of other rows"
    refused(tmp_path, ConfigurationError, words, at_once=False, parts={"train_dataset": Mixed(ROWS)})
    run = make(tmp_path / "cropped", parts={"train_dataset": Cropped(ROWS)}, max_steps=1)
    run.train()
    assert run.ledger.steps == 1
