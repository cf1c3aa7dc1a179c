"""Datasets that make a row of other rows, chosen at random, or by a generator of their own, are refused.

Random choices within a row are not.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch
from PIL import Image

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


@pytest.mark.slow
def test_failure_47_in_a_training(tmp_path: Path) -> None:
    words = "Mixed makes a row of its own data and of other rows"
    refused(tmp_path, ConfigurationError, words, at_once=False, parts={"train_dataset": Mixed(ROWS)})
    run = make(tmp_path / "cropped", parts={"train_dataset": Cropped(ROWS)}, max_steps=1)
    run.train()
    assert run.ledger.steps == 1


# Of a row's tokens, with a generator: by default one that is kept.
Draw = Callable[[np.random.Generator, list[int]], Any]


def rotated(generator: np.random.Generator, ids: list[int]) -> list[int]:
    by = int(generator.integers(100))
    return [(i + by) % 20 for i in ids]


@dataclasses.dataclass
class Example:
    ids: Any


class Opaque:
    """Two are never equal, and nobody looks into them."""

    __slots__ = ()


OF_A_STREAM: dict[str, Draw] = {
    "tokens": rotated,
    "an array": lambda g, ids: np.array(rotated(g, ids)),
    "broken numbers": lambda g, ids: g.random(3),
    "an array of objects": lambda g, ids: np.array([str(g.random()), None], dtype=object),
    "one number": lambda g, ids: g.random(),
    "a tensor": lambda g, ids: torch.tensor(rotated(g, ids)),
    "a broken tensor": lambda g, ids: torch.from_numpy(g.random(3)),
    "text": lambda g, ids: str(rotated(g, ids)),
    "nested": lambda g, ids: [{"ids": tuple(rotated(g, ids))}],
    "a picture": lambda g, ids: Image.fromarray(g.integers(256, size=(4, 4), dtype=np.uint8)),
    "another length": lambda g, ids: ids[: int(g.integers(2))],
    "now and then": lambda g, ids: rotated(g, ids) if g.random() < 0.5 else ids,
}


class Augmented(Rows):
    """By the numbers of one generator for all rows, or of one for each."""

    def __init__(self, draw: Draw, is_kept: bool = True, form: Callable[[Any], Any] = lambda ids: ids) -> None:
        super().__init__(ROWS)
        self.draw, self.is_kept, self.form, self.generator = draw, is_kept, form, np.random.default_rng(0)

    def __getitem__(self, i: int) -> Any:
        generator = self.generator if self.is_kept else np.random.default_rng(np.random.randint(2**31))
        return self.form({**self.data[i], "input_ids": self.draw(generator, self.data[i]["input_ids"])})


class Counting(Rows):
    """Each reading is another: it counts them in the object that it gives."""

    def __getitem__(self, i: int) -> Row:
        row: Row = self.data[i]
        row["reads"] = row.get("reads", 0) + 1
        return row


class Remembering(Rows):
    """With a token of the row before, whichever that was."""

    before = 0

    def __getitem__(self, i: int) -> Row:
        row = {**self.data[i], "input_ids": [*self.data[i]["input_ids"], self.before]}
        self.before = i
        return row


AGAIN = "gives another row when it is read again under the same global random state"


def transformed(is_kept: bool) -> datasets.Dataset:
    generator = np.random.default_rng(0)

    def transform(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        own = generator if is_kept else np.random.default_rng(np.random.randint(2**31))
        return {**batch, "input_ids": [rotated(own, ids) for ids in batch["input_ids"]]}

    return datasets.Dataset.from_list(ROWS).with_transform(transform)


@pytest.mark.few(20)
@pytest.mark.parametrize("case", OF_A_STREAM)
@pytest.mark.parametrize(
    "form", [lambda row: row, lambda row: Example(row["input_ids"]), lambda row: tuple(row.values())]
)
def test_failure_75_a_generator_of_its_own(case: str, form: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match=AGAIN):
        check_dataset(Augmented(OF_A_STREAM[case], form=form))
    check_dataset(Augmented(OF_A_STREAM[case], is_kept=False, form=form))


@pytest.mark.parametrize("dataset", [Counting([dict(row) for row in ROWS]), Remembering(ROWS)], ids=lambda d: type(d))
def test_failure_75_what_follows_from_earlier_reads(dataset: Any) -> None:
    with pytest.raises(ConfigurationError, match=AGAIN):
        check_dataset(dataset)


def test_failure_75_a_transform_with_a_generator_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match=f"^Dataset, by its transform, {AGAIN}"):
        check_dataset(transformed(is_kept=True))
    check_dataset(transformed(is_kept=False))
    check_dataset(datasets.Dataset.from_list(ROWS).with_transform(lambda rows: rows))


def test_what_cannot_be_compared_or_is_rounded_is_no_generator_of_its_own() -> None:
    check_dataset(Augmented(lambda generator, ids: [Opaque(), float("nan"), np.array([np.nan])]))
    check_dataset(Augmented(lambda generator, ids: [x := 1 + 1e-9 * generator.random(), torch.tensor(x), np.array(x)]))


@pytest.mark.slow
def test_failure_75_in_a_training(tmp_path: Path) -> None:
    for dataset in (Augmented(rotated), transformed(is_kept=True)):
        refused(tmp_path, ConfigurationError, AGAIN, at_once=False, parts={"train_dataset": dataset})
    for name, dataset in {"dataset": Augmented(rotated, is_kept=False), "by": transformed(is_kept=False)}.items():
        run = make(tmp_path / name, parts={"train_dataset": dataset}, max_steps=1)
        run.train()
        assert run.ledger.steps == 1


def test_rows_without_a_date_are_alike() -> None:
    check_dataset([{"at": np.datetime64("NaT"), "all": np.array(["NaT"], "M8[s]"), "x": i} for i in range(5)])
