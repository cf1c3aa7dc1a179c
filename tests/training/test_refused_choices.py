"""Weights, steps and rates are not chosen by evaluations of the training data, nor told where logs are withheld."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Subset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from hf_dp.errors import ConfigurationError
from hf_dp.training.refusals.choices import refuse_choices_by_training_data, refuse_told_of_training_data
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.refusing import refused
from tests.training.workbench import classifier, make, private, rows

EACH: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
BEST = {**EACH, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
PLATEAU = {**EACH, "lr_scheduler_type": "reduce_lr_on_plateau"}
GREEDY = {**EACH, "lr_scheduler_type": "greedy"}
OTHERS = rows(8, seed=5)


@pytest.mark.parametrize(
    ("data", "values", "words"),
    [
        (lambda train: train, BEST, "load_best_model_at_end=True with evaluations of the training data"),
        (lambda train: train[:10], PLATEAU, "reduce_lr_on_plateau"),
        (lambda train: train, GREEDY, "greedy"),
        (lambda train: train, {**EACH, "save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy"),
        (
            lambda train: {"some": OTHERS, "all": train},
            {**BEST, "metric_for_best_model": "all_loss"},
            "load_best_model",
        ),
    ],
)
def test_failure_48_choices_by_the_training_data(tmp_path: Path, data: Any, values: Any, words: str) -> None:
    train = rows()
    parts = {"train_dataset": train, "eval_dataset": data(train)}
    refused(tmp_path, ConfigurationError, words, at_once=False, parts=parts, **values)


def test_failure_48_early_stopping_on_a_part_of_a_dataset(tmp_path: Path) -> None:
    train = Dataset.from_list(rows())
    parts = {
        "train_dataset": train, "eval_dataset": train.select(range(9)),
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=1)],
    }  # fmt: skip
    words = "load_best_model_at_end=True and EarlyStoppingCallback"
    refused(tmp_path, ConfigurationError, words, at_once=False, parts=parts, **BEST)


def shuffled_part(train: list[Any]) -> tuple[Any, Any]:
    data = Dataset.from_list(train)
    return data, data.shuffle(seed=1).select(range(9))


PARTS: dict[str, Any] = {
    "a shuffled part": shuffled_part,
    "some of the same dicts": lambda train: (train, train[40:30:-1]),
    "a subset that overlaps": lambda train: (Subset(train, range(40)), Subset(train, range(39, 48))),
}


@pytest.mark.parametrize("case", PARTS)
def test_failure_48_a_part_of_the_training_data_that_begins_otherwise(case: str, tmp_path: Path) -> None:
    parts = dict(zip(("train_dataset", "eval_dataset"), PARTS[case](rows()), strict=True))
    refused(tmp_path, ConfigurationError, "load_best_model_at_end=True with", at_once=False, parts=parts, **BEST)


def test_parts_that_have_no_row_in_common_are_others(tmp_path: Path) -> None:
    split = Dataset.from_list(rows()).train_test_split(9, seed=0)
    both = [(split["train"], split["test"]), (Subset(rows(), range(39)), Subset(rows(), range(39, 48)))]
    for number, (train, test) in enumerate([*both, (split["train"], iter([]))]):
        parts = {"train_dataset": train, "eval_dataset": test}
        refuse_choices_by_training_data(make(tmp_path / str(number), parts=parts, **BEST))


def test_failure_48_a_scheduler_of_ones_own(tmp_path: Path) -> None:
    train, model = rows(), classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {"optimizers": (optimizer, ReduceLROnPlateau(optimizer)), "train_dataset": train, "eval_dataset": train}
    values = {**EACH, "metric_for_best_model": "loss"}
    refused(tmp_path, ConfigurationError, "ReduceLROnPlateau with", at_once=False, model=model, parts=own, **values)


def test_failure_48_the_training_data_without_the_column_of_units(tmp_path: Path) -> None:
    train = [{**row, "user": i % 24} for i, row in enumerate(rows())]
    parts = {"train_dataset": train, "eval_dataset": rows()}
    privacy = private(unit="user", max_examples_per_unit=2)
    refused(tmp_path, ConfigurationError, "load_best_model", at_once=False, privacy=privacy, parts=parts, **BEST)


@pytest.mark.parametrize(
    ("data", "values"),
    [
        (lambda train: train, EACH),
        (lambda train: train[:10], {"eval_on_start": True, "eval_strategy": "epoch"}),
        (lambda train: {"some": OTHERS, "all": train[40:30:-1]}, EACH),
    ],
)
def test_failure_119_evaluations_of_the_training_data_tell_what_logs_withhold(
    tmp_path: Path, data: Any, values: Any
) -> None:
    train = rows()
    parts = {"train_dataset": train, "eval_dataset": data(train)}
    privacy = private(withhold_non_private_logs=True)
    words = "withhold_non_private_logs=True with evaluations of the training data"
    refused(tmp_path, ConfigurationError, words, at_once=False, privacy=privacy, parts=parts, **values)


class Evaluates(TrainerCallback):
    """As the usual recipe for the accuracy on the training data."""

    def __init__(self, data: Any, **values: Any) -> None:
        self.trainer: Any = None
        self.data, self.values = data, values

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate(self.data, **self.values)


def evaluating(tmp_path: Path, callback: Evaluates, *others: Any, **values: Any) -> Any:
    parts = {"train_dataset": rows(), "eval_dataset": OTHERS, "callbacks": [*others, callback]}
    callback.trainer = make(tmp_path, parts=parts, max_steps=2, **values)
    return callback.trainer


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("others", "values", "asked", "words"),
    [
        ([], {"privacy": private(withhold_non_private_logs=True)}, {"metric_key_prefix": "train"}, "withhold_non_priv"),
        ([EarlyStoppingCallback()], {**EACH, "metric_for_best_model": "loss"}, {}, "EarlyStoppingCallback with eval"),
    ],
)
def test_failure_159_a_callback_evaluates_the_training_data(
    tmp_path: Path, others: Any, values: Any, asked: Any, words: str
) -> None:
    run = evaluating(tmp_path, Evaluates(rows(), **asked), *others, **values)
    with pytest.raises(ConfigurationError, match=f"{words}.*of the training data"):
        run.train()
    told = {name for entry in run.state.log_history for name in entry if "loss" in name}
    assert told <= {"loss", "eval_loss"}
    count = len(run.state.log_history)
    run.evaluate(rows(), metric_key_prefix="train")  # by hand, after it
    assert len(run.state.log_history) == count + 1


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("data", "others", "values", "asked"),
    [
        (OTHERS, [], {"privacy": private(withhold_non_private_logs=True)}, {}),
        ({"some": OTHERS}, [], {"privacy": private(withhold_non_private_logs=True)}, {}),
        (None, [EarlyStoppingCallback()], {**EACH, "metric_for_best_model": "loss"}, {}),
        (rows(), [EarlyStoppingCallback()], {**EACH, "metric_for_best_model": "loss"}, {"metric_key_prefix": "train"}),
        (rows(), [], {}, {}),
    ],
)
def test_a_callback_may_evaluate_others_and_what_nobody_chooses_by(
    tmp_path: Path, data: Any, others: Any, values: Any, asked: Any
) -> None:
    run = evaluating(tmp_path, Evaluates(data, **asked), *others, **values)
    run.train()
    assert run.ledger.steps == 2


class EvaluatesAtTheEnd(Evaluates):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate(self.data, **self.values)


@pytest.mark.usefixtures("checked_once")
def test_a_callback_may_evaluate_the_training_data_when_the_training_is_over(tmp_path: Path) -> None:
    asked = EvaluatesAtTheEnd(rows(), metric_key_prefix="train")
    run = evaluating(
        tmp_path, asked, privacy=private(withhold_non_private_logs=True), save_strategy="steps", save_steps=1
    )
    run.train()
    assert run.ledger.steps == 2
    for saved in tmp_path.rglob("trainer_state.json"):
        assert "train_loss" not in saved.read_text(encoding="utf-8")


class WithExamples(Trainer):
    """As the trainer of Transformers' examples for question answering: one argument more, in the middle."""

    def evaluate(  # type: ignore[override]
        self,
        eval_dataset: Any = None,
        eval_examples: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        self.given = eval_examples, ignore_keys, metric_key_prefix
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)


class PrivateWithExamples(DPTrainerMixin, WithExamples):
    pass


@pytest.mark.usefixtures("checked_once")
def test_a_class_behind_that_evaluates_otherwise_gets_what_it_was_given(tmp_path: Path) -> None:
    run: Any = make(tmp_path, kind=PrivateWithExamples, parts={"eval_dataset": OTHERS}, max_steps=1, **EACH)
    run.train()
    assert run.given == (None, None, "eval")
    run.is_in_train = True
    run.evaluate(OTHERS, "examples", ["past"], "some")
    assert run.given == ("examples", ["past"], "some")


def test_who_withholds_logs_may_evaluate_others_and_nothing(tmp_path: Path) -> None:
    train, privacy = rows(), private(withhold_non_private_logs=True)
    for number, (data, values) in enumerate([(OTHERS, EACH), (train, {})]):
        parts = {"train_dataset": train, "eval_dataset": data}
        refuse_told_of_training_data(make(tmp_path / str(number), privacy=privacy, parts=parts, **values))


@pytest.mark.usefixtures("checked_once")
@pytest.mark.slow
def test_looking_at_the_training_data_and_choosing_by_others_is_welcome(tmp_path: Path) -> None:
    train = rows()
    looked_at = make(
        tmp_path / "looked at", parts={"train_dataset": train, "eval_dataset": train}, eval_strategy="steps",
        eval_steps=1, max_steps=1,
    )  # fmt: skip
    both = {"train_dataset": train, "eval_dataset": {"all": train, "some": OTHERS}}
    chosen = make(tmp_path / "chosen", parts=both, max_steps=1, **{**BEST, "metric_for_best_model": "some_loss"})
    for run in (looked_at, chosen):
        run.train()
        assert run.ledger.steps == 1
