"""An evaluation that cannot work is found before anything is spent."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import global_state
from tests.training.refusing import refused
from tests.training.workbench import classifier, make, parameters, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")
EACH: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "per_device_eval_batch_size": 4}
OTHERS = rows(10, seed=5)


def typo(evaluated: Any) -> dict[str, float]:
    return {"accuracy": float(evaluated.predictons.mean())}


def right(evaluated: Any) -> dict[str, float]:
    return {"accuracy": float((evaluated.predictions.argmax(1) == evaluated.label_ids).mean())}


def broken(n: int = 10) -> list[Any]:
    """Rows that the collator cannot read."""
    return [{"input_ids": None, "labels": 0} for _ in range(n)]


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (broken(), "eval_dataset "),
        (Dataset.from_list([{"input_ids": "text", "labels": 0}] * 5), "eval_dataset "),
        ({"some": OTHERS, "other": broken()}, r"eval_dataset\['other'\] "),
    ],
)
def test_rows_that_cannot_be_evaluated(tmp_path: Path, data: Any, name: str) -> None:
    words = f"evaluation fails on the first rows of {name}"
    found = refused(tmp_path, ConfigurationError, words, at_once=False, parts={"eval_dataset": data}, **EACH)
    assert found.__cause__ is not None
    assert "first evaluation" in found.why


def test_a_column_that_trainer_dropped_is_said_to_be_missing(tmp_path: Path) -> None:
    """As where a transform reads pictures, which no forward names."""
    pictures = Dataset.from_list([{**row, "image": [1, 2]} for row in OTHERS]).with_transform(
        lambda batch: {"input_ids": batch["image"], "labels": batch["labels"]}
    )
    words = "evaluation fails on the first rows of eval_dataset .*KeyError"
    found = refused(tmp_path, ConfigurationError, words, at_once=False, parts={"eval_dataset": pictures}, **EACH)
    assert "remove_unused_columns=False" in found.fix
    assert "leave eval_strategy out" not in found.fix


def test_what_is_not_evaluated_is_not_tried(tmp_path: Path) -> None:
    make(tmp_path, parts={"eval_dataset": broken()}, max_steps=1).train()


def test_a_typo_in_a_metric_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make(tmp_path, parts={"eval_dataset": OTHERS, "compute_metrics": typo}, **EACH)

    class Before(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            assert "predictons" in caplog.text
            assert "eval_on_start=True" in caplog.text
            assert not run.ledger.steps

    run.add_callback(Before())
    with caplog.at_level(logging.WARNING), pytest.raises(AttributeError, match="predictons"):
        run.train()
    assert run.ledger.steps == 1


def test_with_eval_on_start_a_typo_costs_nothing(tmp_path: Path) -> None:
    run = make(tmp_path, parts={"eval_dataset": OTHERS, "compute_metrics": typo}, eval_on_start=True, **EACH)
    with pytest.raises(AttributeError, match="predictons"):
        run.train()
    assert not run.ledger.steps


@pytest.mark.parametrize("preprocess", [None, lambda logits, labels: logits.argmx(1)])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.slow
def test_metrics_that_need_more_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, preprocess: Any, batched: bool
) -> None:
    counted: list[int] = []

    def of_many(evaluated: Any, compute_result: bool = True) -> dict[str, float]:
        counted.append(len(evaluated.label_ids))
        if sum(counted) < 8:
            raise ValueError("too few")
        return {"seen": float(sum(counted))}

    parts = {"eval_dataset": OTHERS, "compute_metrics": of_many, "preprocess_logits_for_metrics": preprocess}
    run = make(tmp_path, parts=parts, batch_eval_metrics=batched, **EACH)
    if preprocess is not None:
        with caplog.at_level(logging.WARNING), pytest.raises(AttributeError, match="argmx"):
            run.train()
        assert "argmx" in caplog.text
        return
    with caplog.at_level(logging.WARNING):
        run.train()
    assert "too few" in caplog.text
    assert run.ledger.steps == 2


def test_a_best_model_by_what_no_evaluation_gives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = {**EACH, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    parts: dict[str, Any] = {"eval_dataset": OTHERS}
    words = "metric_for_best_model='acuracy', and an evaluation gives eval_loss"
    refused(tmp_path, ConfigurationError, words, at_once=False, parts=parts, metric_for_best_model="acuracy", **best)
    run = make(tmp_path, parts={**parts, "compute_metrics": right}, metric_for_best_model="acuracy", **best)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError):
        run.train()
    assert "metric_for_best_model='acuracy' is not among" in caplog.text
    assert "eval_accuracy" in caplog.text


@pytest.mark.slow
def test_keys_that_are_left_out_are_left_out_here_too(tmp_path: Path) -> None:
    class Cached(DPTrainer):
        """Returns what Trainer cannot gather."""

        def prediction_step(
            self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **others: Any
        ) -> Any:
            assert ignore_keys == ["cache"]
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    make(tmp_path, kind=Cached, parts={"eval_dataset": OTHERS}, **EACH).train(ignore_keys_for_eval=["cache"])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(OTHERS)


@pytest.mark.slow
def test_what_is_not_tried(tmp_path: Path) -> None:
    class Own(DPTrainer):
        times = 0

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self.times += 1
            assert self.ledger.steps
            return super().evaluate(*args, **kwargs)

    run = make(tmp_path, kind=Own, parts={"eval_dataset": OTHERS}, **EACH)
    run.train()
    assert run.times == 2
    run = make(tmp_path, parts={"eval_dataset": Stream()}, **EACH)
    run.train()
    assert run.ledger.steps == 2


@pytest.mark.slow
def test_nothing_of_it_stays(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"prediction after {state.global_step}")

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(f"log after {state.global_step}")

    def trained(**changes: Any) -> Any:
        torch.manual_seed(0)
        run = make(tmp_path, classifier(), parts={"eval_dataset": OTHERS}, **{**EACH, **changes})
        run.add_callback(Watching())
        run.train()
        return run

    tried, plain = trained(), trained(eval_strategy="no")
    assert same(parameters(tried.model), parameters(plain.model))
    assert not [words for words in seen if words.endswith("after 0")]
    assert tried.state.log_history[0]["step"] == 1

    run = make(tmp_path, classifier(), parts={"eval_dataset": OTHERS, "compute_metrics": right}, **EACH)
    run.args.dataloader_persistent_workers, run._eval_dataloaders = False, {"eval": "kept"}
    run.model.train()
    run.model.distilbert.eval()
    modes = [module.training for module in run.model.modules()]
    before, state = dict(vars(run)), global_state()
    loaders = list(run.accelerator._dataloaders)
    run._try_evaluation()
    assert modes == [module.training for module in run.model.modules()]
    assert {name for name in before if vars(run).get(name) is not before[name]} <= {"_signature_columns"}
    assert state == global_state()
    assert run.accelerator._dataloaders == loaders
    assert not run.state.log_history
