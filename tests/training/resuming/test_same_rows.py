"""Several private trainings of one process on the same rows: said, and never taken for trainings on other people."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import Subset

from hf_dp import PrivacyConfig
from hf_dp.errors import LedgerError
from hf_dp.training.resuming import same_rows
from tests.training.workbench import classifier, make, rows

pytestmark = pytest.mark.usefixtures("checked_once")

WORDS = "Another private training in this process has drawn from the same rows"


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, i: int) -> Any:
        return rows()[i]


def of(**changes: Any) -> PrivacyConfig:
    return PrivacyConfig(noise_multiplier=1.0, target_delta=1e-3, **changes)


@pytest.mark.parametrize("data", [Rows(), Dataset.from_list(rows(seed=3))])
@pytest.mark.slow
def test_failure_83_what_left_these_weights_drew_from_rows_of_this_data(data: Any, tmp_path: Path) -> None:
    first = make(tmp_path / "first", privacy=of(), parts={"train_dataset": data}, max_steps=1)
    first.train()
    first.save_model()
    few = data.shuffle().select(range(20)) if isinstance(data, Dataset) else Subset(data, range(20))
    for model, some in ((first.model, data), (copy.deepcopy(first.model), few)):
        second = make(tmp_path, model, of(other_people=True), parts={"train_dataset": some}, max_steps=1)
        with pytest.raises(LedgerError, match="other_people=True, for weights that .* on rows of this data"):
            second.train()
        assert not second.ledger.entries
    for number, (model, promise, rest) in enumerate(
        [
            (first.model, of(after=str(tmp_path / "first")), data),
            (copy.deepcopy(first.model), of(other_people=True), rows()),
        ]
    ):
        make(tmp_path / str(number), model, promise, parts={"train_dataset": rest}, max_steps=1).train()


@pytest.mark.slow
def test_several_trainings_on_the_same_rows_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said, data = [], Dataset.from_list(rows(seed=4))
    for name, privacy, rest in (
        ("first", of(), data),
        ("others", of(), Dataset.from_list(rows(seed=5))),
        ("after", of(after=str(tmp_path / "first")), data),
        ("second", of(), data),
        ("third", of(), data),
    ):
        same_rows._say_so.cache_clear() if name == "first" else None
        caplog.clear()
        trainer = make(tmp_path / name, classifier(), privacy, parts={"train_dataset": rest}, max_steps=1)
        trainer.train()
        trainer.train()
        trainer.save_model()
        said += [name] * (WORDS in caplog.text)
    assert said == ["second"]


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy])
@pytest.mark.slow
def test_failure_83_by_way_of_a_training_on_others(copied: Any, tmp_path: Path) -> None:
    parts = Dataset.from_list(rows(96, seed=6)).train_test_split(0.5)
    first = make(tmp_path / "first", privacy=of(), parts={"train_dataset": parts["train"]}, max_steps=1)
    first.train()
    others = of(other_people=True)
    second = make(tmp_path / "second", first.model, others, parts={"train_dataset": parts["test"]}, max_steps=1)
    second.train()
    third = make(tmp_path, copied(second.model), others, parts={"train_dataset": parts["train"]}, max_steps=1)
    with pytest.raises(LedgerError, match="other_people=True, for weights that .* on rows of this data"):
        third.train()


@pytest.mark.slow
def test_a_training_that_goes_on_is_told_of_no_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"train_dataset": Dataset.from_list(rows(seed=7))}
    first = make(tmp_path, privacy=of(), parts=data, max_steps=2, save_strategy="steps", save_steps=1)
    first.train()
    again = make(tmp_path, privacy=of(), parts=data, max_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    same_rows._say_so.cache_clear()
    again.train()
    assert WORDS not in caplog.text


@pytest.mark.slow
def test_of_each_other_training_its_rows_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, asked = Dataset.from_list(rows(96, seed=8)).train_test_split(0.5), []
    first = make(tmp_path / "first", privacy=of(), parts={"train_dataset": parts["train"]}, max_steps=1)
    first.train()
    monkeypatch.setattr(same_rows, "are_in_both", lambda *data: bool(asked.append(data)))
    others = {"privacy": of(other_people=True), "parts": {"train_dataset": parts["test"]}}
    make(tmp_path / "second", first.model, max_steps=1, **others).train()
    assert sum(one is parts["train"] for one, _ in asked) <= 3  # not for each parameter


def test_failure_145_a_second_training_from_one_checkpoint_is_told_of_the_steps_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(tmp_path, privacy=of(), max_steps=3, save_strategy="steps", save_steps=2)
    first.train()
    first.save_model(str(tmp_path / "elsewhere"))
    shutil.rmtree(tmp_path / "checkpoint-3")
    second = make(tmp_path, privacy=of(), max_steps=3)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "has made 1 private step since 'checkpoint-2', from which this one goes on" in caplog.text
    assert (first.ledger.steps, second.ledger.steps) == (3, 3)
    caplog.clear()
    first.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # whose ledger has its own
    assert first.ledger.steps == 4
    assert "has made" not in caplog.text


@pytest.mark.slow
def test_a_training_after_a_record_is_told_of_what_went_on_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    middle, end = str(tmp_path / "middle"), str(tmp_path / "end")
    first = make(tmp_path / "first", privacy=of(), max_steps=1)
    first.train()
    first.save_model(middle)
    first.train()
    first.save_model(end)
    for after, is_told in ((middle, True), (end, False), ([middle, end], False)):
        caplog.clear()
        make(tmp_path / "second", classifier(), of(after=after), max_steps=1).train()
        assert ("has made 1 private step since it saved 'middle', which after= names" in caplog.text) == is_told


@pytest.mark.slow
def test_a_training_that_goes_on_is_told_of_one_on_the_same_rows_that_it_has_nothing_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"train_dataset": Dataset.from_list(rows(seed=9))}

    def one(name: str, **changes: Any) -> Any:
        return make(tmp_path / name, privacy=of(), parts=data, max_steps=2, **changes)

    one("first", save_strategy="steps", save_steps=1).train()
    same_rows._say_so.cache_clear()
    for last in (2, 1):  # each has all that the ones before it made
        one("first").train(resume_from_checkpoint=str(tmp_path / "first" / f"checkpoint-{last}"))
        assert WORDS not in caplog.text
    one("other").train()
    assert WORDS in caplog.text
    same_rows._say_so.cache_clear()
    caplog.clear()
    one("first").train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert WORDS in caplog.text
