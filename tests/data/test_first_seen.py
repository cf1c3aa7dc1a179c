"""What a row becomes does not follow from which rows were read before it: nothing is numbered as it comes."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from torch import Tensor, nn

from hf_dp import DPTrainer
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.first_seen import check_order, left_as_it_was
from hf_dp.data.mixing_collator import check_collator
from hf_dp.errors import ConfigurationError
from tests.training.refusing import refused
from tests.training.workbench import make, pad, rows

Row = dict[str, Any]
NAMES = ["cat", "dog", "cow", "hen", "ant"]
ROWS: list[Row] = [{"input_ids": [3, i % 7], "number": i, "name": NAMES[i * i % 5]} for i in range(40)]
WORDS = "makes another row of an example when other rows came before it"
SEEN: dict[str, int] = {}


def batch(made: list[Row]) -> dict[str, Tensor]:
    numbers = {name: [row[name] for row in made] for name in ("input_ids", "labels")}
    return {name: torch.as_tensor(np.asarray(values)) for name, values in numbers.items()}


class Collator:
    """Numbers labels by `number`, of what it holds and the name."""

    def __init__(self, number: Callable[[Any, str], Any], **held: Any) -> None:
        self.number, self.__dict__ = number, {**self.__dict__, **held, "number": number}

    def __call__(self, made: list[Row]) -> dict[str, Tensor]:
        return batch([{**row, "labels": self.number(self, row["name"])} for row in made])


def of_its_file(made: list[Row]) -> dict[str, Tensor]:
    return batch([{**row, "labels": SEEN.setdefault(row["name"], len(SEEN))} for row in made])


def of_its_closure() -> Any:
    seen: defaultdict[str, int] = defaultdict(lambda: len(seen))
    return lambda made: batch([{**row, "labels": seen[row["name"]]} for row in made])


def of_its_default(made: list[Row], known: dict[str, int] = {}) -> Any:  # noqa: B006
    return batch([{**row, "labels": known.setdefault(row["name"], len(known))} for row in made])


def of_a_counter() -> Any:
    seen = defaultdict[str, int](itertools.count().__next__)
    return lambda made: batch([{**row, "labels": seen[row["name"]]} for row in made])


class OfItsFile:
    def __call__(self, made: list[Row]) -> dict[str, Tensor]:
        return of_its_file(made)


def appended(self: Any, name: str) -> int:
    if name not in self.names:
        self.names.append(name)
    return int(self.names.index(name))


def by_the_largest(self: Any, name: str) -> float:
    self.largest = max(self.largest, len(name) * ord(name[0]))
    return len(name) / self.largest + 0.01 * float(torch.rand(()))


class Names:
    names: ClassVar[list[str]] = []


COLLATORS: dict[str, Callable[[], Any]] = {
    "a class that it names": lambda: Collator(lambda self, name: appended(Names, name)),
    "a dict": lambda: Collator(lambda self, name: self.seen.setdefault(name, len(self.seen)), seen={}),
    "a list": lambda: Collator(appended, names=[]),
    "a running maximum, and noise": lambda: Collator(by_the_largest, largest=1.0),
    "a dict of its file": lambda: of_its_file,
    "a dict around it": of_its_closure,
    "a dict that is a default": lambda: of_its_default,
    "a dict of the file of an object": OfItsFile,
    "a counter that is not put back": of_a_counter,
}


@pytest.mark.parametrize("case", COLLATORS)
def test_failure_80_labels_are_numbered_as_they_come(case: str) -> None:
    collate = COLLATORS[case]()
    with pytest.raises(ConfigurationError, match=f"^the data collator .* {WORDS}"):
        check_order(ROWS, LogicalBatchCollator(4, collate))
    assert not SEEN
    assert not getattr(collate, "seen", {})


class Read(torch.utils.data.Dataset[Row]):
    """Numbers words in a dict that it holds."""

    def __init__(self, known: dict[str, int] | None = None) -> None:
        self.known = {} if known is None else known

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> Row:
        return {**ROWS[i], "labels": self.known.setdefault(ROWS[i]["name"], len(self.known))}


class InOrder(Read):
    """Rows by length, of which the longest so far is each."""

    longest = 0

    def __getitem__(self, i: int) -> Row:
        self.longest = max(self.longest, i)
        return {**ROWS[i], "labels": i / max(1, self.longest)}


class Alike:
    """No subclass of torch's."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    __len__, __getitem__ = Read.__len__, Read.__getitem__


class Listed(list[Row]):
    """Which numbers what it holds."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.known: dict[str, int] = {}

    def __getitem__(self, i: Any) -> Any:
        row = super().__getitem__(i)
        return {**row, "labels": self.known.setdefault(row["name"], len(self.known))}


class OfAFile(Read):
    def __getitem__(self, i: int) -> Row:
        return {**ROWS[i], "labels": SEEN.setdefault(ROWS[i]["name"], len(SEEN))}


class Numbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def forward(self, name: str) -> int:
        return self.seen.setdefault(name, len(self.seen))


class Given(Read):
    """Which a transform of any kind makes numbers for."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __getitem__(self, i: int) -> Row:
        return {**ROWS[i], "labels": self.number(ROWS[i]["name"])}


class Late(Read):
    """Whose dict is made with the first row."""

    def __init__(self) -> None:
        self.later: dict[str, int] | None = None

    def __getitem__(self, i: int) -> Row:
        self.later = {} if self.later is None else self.later
        return {**ROWS[i], "labels": self.later.setdefault(ROWS[i]["name"], len(self.later))}


def transformed() -> datasets.Dataset:
    seen: dict[str, int] = {}

    def transform(few: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**few, "labels": [seen.setdefault(name, len(seen)) for name in few["name"]]}

    return datasets.Dataset.from_list(ROWS).with_transform(transform)


DATASETS: dict[str, Callable[[], Any]] = {
    "of Python's": Read,
    "a part of one": lambda: torch.utils.data.Subset(Read(), range(30)),
    "two of them": lambda: torch.utils.data.ConcatDataset([Read(), Read()]),
    "a transform": transformed,
    "two of one name": lambda: torch.utils.data.ConcatDataset([transformed().select([0]), transformed()]),
    "of rows in order": InOrder,
    "of no class of torch": Alike,
    "a list of a class of its own": Listed,
    "by a dict of its file": OfAFile,
    "by a module": lambda: Given(Numbers()),
    "by a partial": lambda: Given(functools.partial(lambda seen, name: seen.setdefault(name, len(seen)), {})),
    "by a dict that is made late": Late,
}


@pytest.mark.parametrize("case", DATASETS)
def test_failure_80_a_dataset_numbers_words_as_they_come(case: str) -> None:
    dataset = DATASETS[case]()
    with pytest.raises(ConfigurationError, match=f"^(?!the data collator).*{WORDS}"):
        check_order(dataset, LogicalBatchCollator(4, batch))
    assert not getattr(dataset, "known", {})
    assert not SEEN


def test_what_is_known_before_or_follows_from_a_row_alone_is_welcome() -> None:
    known = {name: i for i, name in enumerate(NAMES)}
    kept: dict[int, Any] = {}

    def cached(made: list[Row]) -> dict[str, Tensor]:
        return batch([kept.setdefault(row["number"], {**row, "labels": known[row["name"]]}) for row in made])

    def at_random(made: list[Row]) -> dict[str, Tensor]:
        return batch([{**row, "labels": float(torch.rand(()))} for row in made])

    for collate in (cached, at_random, Collator(lambda self, name: self.known[name], known=known)):
        check_order(ROWS, LogicalBatchCollator(4, collate))
    for dataset in (Read(dict(known)), datasets.Dataset.from_list([{**row, "labels": 0} for row in ROWS]), []):
        check_order(dataset, LogicalBatchCollator(4, batch))


def test_what_is_loaded_with_the_first_row_is_loaded_once() -> None:
    class Lazy(Read):
        """Which numbers as it goes besides."""

        data: Any = None

        @cached_property
        def words(self) -> list[str]:
            next(loads)
            return list(NAMES)

        def __getitem__(self, i: int) -> Row:
            if self.data is None:
                next(loads)
                self.data = list(ROWS)
            return {**super().__getitem__(i), "word": self.words[0], **self.data[i]}

    for known in ({name: i for i, name in enumerate(NAMES)}, None):
        dataset, loads = Lazy(known), itertools.count()  # no number that would be put back
        with left_as_it_was(dataset):
            dataset[len(ROWS) - 1]
        assert len(dataset.known) == (5 if known else 0)
        with nullcontext() if known else pytest.raises(ConfigurationError, match=f"Lazy {WORDS}"):
            check_order(dataset, LogicalBatchCollator(4, batch))
        assert next(loads) == 2


class OfAStream(Read):
    """Which is opened with the first row, and read on from where it stands."""

    is_open, at, stream = False, 0, None

    def __getitem__(self, i: int) -> Row:
        if not self.is_open:
            assert self.stream is None
            self.stream, self.is_open, self.width = io.BytesIO(bytes(range(40))), True, 1
        assert self.stream is not None
        if i != self.at:
            self.stream.seek(i)
        self.at = i + 1
        return {**ROWS[i], "labels": self.stream.read(self.width)[0]}


def test_what_is_open_stands_where_its_dataset_has_it() -> None:
    for reads in ([39], [0], [], [7, 8]):
        dataset = OfAStream()
        for i in reads:
            with left_as_it_was(dataset):
                dataset[i]
        check_order(dataset, LogicalBatchCollator(4, batch))
        assert [dataset[i]["labels"] for i in (0, 1, 5, 6, 39, 0)] == [0, 1, 5, 6, 39, 0]


class InParts(Read):
    """Of which one is held at a time, in a table of a library."""

    part, table = -1, pyarrow.table({})

    def __getitem__(self, i: int) -> Row:
        if self.part != i // 10:
            first = 10 * (i // 10)
            self.table, self.part = pyarrow.table({"number": range(first, first + 10)}), i // 10
        return {**ROWS[i], "labels": self.table["number"][i % 10].as_py()}


def test_a_part_that_is_held_is_the_one_that_its_number_says() -> None:
    for reads in ([39], [0], [], [5, 15]):
        dataset = InParts()
        for i in reads:
            with left_as_it_was(dataset):
                dataset[i]
            assert [dataset[j]["labels"] for j in (0, 39, i)] == [0, 39, i]
        check_order(dataset, LogicalBatchCollator(4, batch))
        assert all(copy.copy(dataset)[i]["labels"] == i for i in range(len(ROWS)))


class AGenerator:
    """Of its own, which is made with the first batch."""

    made_by: int | None = None

    def __call__(self, made: list[Row]) -> dict[str, Tensor]:
        if self.made_by != 1:
            self.generator, self.made_by = torch.Generator().manual_seed(3), 1
        return batch([{**row, "labels": float(torch.rand((), generator=self.generator))} for row in made])


def test_of_a_generator_of_its_own_another_check_says_what_it_is() -> None:
    rows_of_it = LogicalBatchCollator(4, AGenerator())
    check_order(ROWS, rows_of_it)
    with pytest.raises(ConfigurationError, match="draws other numbers under the same global random state"):
        check_collator(rows_of_it, ROWS[:2])


def test_of_what_fails_or_differs_by_itself_nothing_is_said() -> None:
    generator = np.random.default_rng(0)
    for number in (lambda *_: generator.random(), lambda *_: 1 / 0):
        check_order(ROWS, LogicalBatchCollator(4, Collator(number)))


class Holding(Read):
    """Which holds what holds it."""

    def __init__(self, other: Any) -> None:
        super().__init__({name: i for i, name in enumerate(NAMES)})
        self.others = [self, other]


def test_datasets_that_hold_one_another() -> None:
    check_order(dataset := Holding(Holding(None)), LogicalBatchCollator(4, batch))
    dataset.others[1].others[1] = dataset
    check_order(dataset, LogicalBatchCollator(4, batch))


class OfTwo(torch.utils.data.Dataset[Row]):
    """Of which one is known once a single row has been read."""

    def __init__(self) -> None:
        self.rows, self.known = rows(), dict[bool, int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        row = self.rows[i]
        return {**row, "labels": self.known.setdefault(row["labels"] > 1, len(self.known))}


class Numbering(DPTrainer):
    """On the device."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.known: dict[int, int] = {}
        super().__init__(*args, **options)

    def _prepare_inputs(self, inputs: Any) -> Any:
        numbers = [self.known.setdefault(int(label), len(self.known)) for label in inputs["labels"]]
        return super()._prepare_inputs({**inputs, "labels": torch.tensor(numbers)})


@pytest.mark.slow
def test_failure_80_in_a_training(tmp_path: Path) -> None:
    class Labels:
        def __init__(self, known: dict[int, int]) -> None:
            self.known = known

        def __call__(self, made: list[Row]) -> dict[str, Tensor]:
            numbers = [self.known.setdefault(row["labels"], len(self.known)) for row in made]
            return pad([{**row, "labels": number} for row, number in zip(made, numbers, strict=True)])

    parts = {"train_dataset": rows(), "data_collator": Labels({})}
    refused(tmp_path, ConfigurationError, WORDS, at_once=False, parts=parts)
    refused(tmp_path, ConfigurationError, f"^OfTwo {WORDS}", at_once=False, parts={"train_dataset": OfTwo()})
    refused(tmp_path, ConfigurationError, f"_prepare_inputs, {WORDS}", at_once=False, kind=Numbering)
    run = make(tmp_path / "known", parts={**parts, "data_collator": Labels({i: i for i in range(3)})}, max_steps=1)
    run.train()
    assert run.ledger.steps == 1
