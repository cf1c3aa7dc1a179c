"""Bad input is refused by name, with a way out, before anything is spent and before any parameter changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_dp import DPTrainer, PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.training.refusals import private_arguments
from tests.training.refusing import refused
from tests.training.workbench import ROWS, arguments, classifier, make, pad, private, rows


@pytest.mark.slow
def test_the_helper_notices_what_is_not_refused(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refused(tmp_path, ConfigurationError, "anything")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "target_epsilon=None and noise_multiplier=None"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "target_epsilon=1.0 and noise_multiplier=1.0"),
        ({"target_epsilon": 0}, "target_epsilon=0"),
        ({"target_epsilon": -1.0}, "target_epsilon=-1.0"),
        ({"target_epsilon": float("inf")}, "target_epsilon=inf"),
        ({"target_epsilon": float("nan")}, "target_epsilon=nan"),
        ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1"),
        ({"target_epsilon": 1.0, "target_delta": 0.0}, "target_delta=0.0"),
        ({"target_epsilon": 1.0, "target_delta": 1.5}, "target_delta=1.5"),
        ({"target_epsilon": 1.0, "clipping_norm": 0.0}, "clipping_norm=0.0"),
        ({"target_epsilon": 1.0, "clipping_norm": float("inf")}, "clipping_norm=inf together with noise"),
    ],
)
def test_a_promise_that_is_none(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        PrivacyConfig(**values)
    assert caught.value.fix


@pytest.mark.parametrize("privacy", [None, {"target_epsilon": 8.0}, 8.0])
def test_something_else_in_place_of_a_promise(tmp_path: Path, privacy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"PrivacyConfig\(target_epsilon=8.0\)"):
        DPTrainer(model=classifier(), args=arguments(tmp_path), train_dataset=rows(), privacy=privacy)


@pytest.mark.parametrize("delta", [1 / ROWS, 0.5])
def test_a_delta_of_1_over_n_or_more(tmp_path: Path, delta: float) -> None:
    refused(tmp_path, ConfigurationError, f"delta={delta}", privacy=private(target_delta=delta))


def test_a_delta_that_only_the_number_of_rows_shows_to_be_bad(tmp_path: Path) -> None:
    config = PrivacyConfig(target_epsilon=8.0, target_delta=1 / ROWS)
    refused(tmp_path, ConfigurationError, "delta=", privacy=config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_grad_norm": 0.5}, "max_grad_norm=0.5"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"weight_decay": 1e300}, "weight_decay=1e\\+300"),
        ({"adam_epsilon": float("inf")}, "adam_epsilon=inf"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"label_smoothing_factor": 2.0}, "label_smoothing_factor=2.0"),
        ({"label_smoothing_factor": -1.0}, "label_smoothing_factor=-1.0"),
        ({"label_smoothing_factor": float("nan")}, "label_smoothing_factor=nan"),
        ({"num_train_epochs": float("inf")}, "num_train_epochs=inf"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs=nan"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"max_steps": 1.5}, "max_steps=1.5"),
        ({"max_steps": True}, "max_steps=True"),
        ({"per_device_train_batch_size": "8"}, "per_device_train_batch_size='8'"),
        ({"per_device_train_batch_size": -4}, "per_device_train_batch_size=-4"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy='sequential'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"debug": "underflow_overflow"}, "debug='underflow_overflow'"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"optim": "lomo"}, "optim='lomo'"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"}, "layerwise"),
    ],
)
def test_failure_22_and_23_arguments_that_would_break_the_promise(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    refused(tmp_path, ConfigurationError, words, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "DeepSpeed"),
        ({"use_liger_kernel": True}, "use_liger_kernel=True"),
    ],
)
def test_failure_23_arguments_that_not_every_machine_lets_be_made(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    args = arguments(tmp_path)
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(ConfigurationError, match=words) as caught:
        private_arguments(args, PrivacyConfig(target_epsilon=1))
    assert caught.value.fix


@pytest.mark.parametrize("backend", ["INDUCTOR", "aot_eager"])
def test_what_accelerate_would_compile(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", backend)
    refused(tmp_path, ConfigurationError, f"torch.compile by '{backend}', as accelerate was told")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    make(tmp_path)


@pytest.mark.parametrize("value", [0, 0.0, 1.0])
def test_max_grad_norm_may_be_0_or_the_default(tmp_path: Path, value: float) -> None:
    assert make(tmp_path, max_grad_norm=value).args.max_grad_norm == 0


def test_label_smoothing_where_it_is_not_defined(tmp_path: Path) -> None:
    def multi(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {**pad(examples), "labels": torch.eye(3)[[e["labels"] for e in examples]]}

    for problem in ("multi_label_classification", "regression"):
        model: Any = classifier()
        model.config.problem_type = problem
        refused(
            tmp_path, ConfigurationError, "label_smoothing_factor=0.1", model, at_once=False,
            parts={"data_collator": multi}, label_smoothing_factor=0.1,
        )  # fmt: skip


def test_no_steps(tmp_path: Path) -> None:
    config = PrivacyConfig(target_epsilon=8.0)
    refused(
        tmp_path, ConfigurationError, "num_train_epochs=0", privacy=config, max_steps=-1, num_train_epochs=0
    )  # fmt: skip


def test_failure_12_an_optimizer_that_asks_for_the_gradient_again(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters())
    refused(tmp_path, ConfigurationError, "LBFGS", model, parts={"optimizers": (optimizer, None)})


class Sharp(torch.optim.SGD):
    """Says only when it steps that it asks for a closure, as sharpness-aware ones do."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharp requires closure, but it was not provided"
        return super().step(closure)


def test_failure_12_an_optimizer_that_asks_for_it_in_its_step(tmp_path: Path) -> None:
    model = classifier()
    optimizer = Sharp(model.parameters(), lr=0.1)
    refused(tmp_path, ConfigurationError, "Sharp evaluates the gr", model, parts={"optimizers": (optimizer, None)})


class Counting(torch.optim.SGD):
    """Counts its steps in a tensor of each group, as fused ones do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
        return super().step(closure)


def test_an_optimizer_that_is_tried_counts_no_step(tmp_path: Path) -> None:
    model = classifier()
    optimizer = Counting([{"params": [*model.parameters()], "count": torch.zeros(1)}], lr=0.1)
    make(tmp_path, model, parts={"optimizers": (optimizer, None)})
    assert optimizer.param_groups[0]["count"] == 0


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    other = torch.optim.SGD(classifier().parameters(), lr=0.1)
    refused(tmp_path, ConfigurationError, "SGD holds none", parts={"optimizers": (other, None)})


@pytest.mark.slow
def test_an_optimizer_of_some_parameters_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(freeze: bool) -> str:
        model: Any = classifier()
        model.distilbert.requires_grad_(not freeze)
        optimizer = torch.optim.SGD([*model.pre_classifier.parameters(), *model.classifier.parameters()], lr=0.1)
        caplog.clear()
        make(tmp_path, model, parts={"optimizers": (optimizer, None)}, max_steps=1).train()
        return caplog.text

    assert re.search(r"SGD holds none of \d+ trainable parameters, distilbert\.", said := trained(freeze=False))
    assert said.count("trainable parameters") == 1
    assert "trainable parameters" not in trained(freeze=True)


def test_failure_12_an_optimizer_that_the_trainer_makes_is_looked_at_as_well(tmp_path: Path) -> None:
    class Own(DPTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.LBFGS(self.model.parameters())
            return self.optimizer

    refused(tmp_path, ConfigurationError, "LBFGS", kind=Own, at_once=False)


def test_hyperparameter_search(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(ConfigurationError, match=r"hyperparameter_search[\s\S]*public data[\s\S]*after="):
        trainer.hyperparameter_search(n_trials=2)
    assert trainer.ledger.steps == 0


def test_failure_23_mixed_precision_that_accelerate_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    refused(tmp_path, ConfigurationError, "mixed precision 'fp16'")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "gradient_accumulation_steps",
            3,
            "trainer.args.gradient_accumulation_steps=3, set after the trainer was made.",
        ),
        ("max_grad_norm", 1.0, "trainer.args.max_grad_norm=1.0, set after the trainer was made."),
        ("max_grad_norm", 0.5, "max_grad_norm=0.5."),
        ("auto_find_batch_size", True, "auto_find_batch_size=True."),
    ],
)
def test_an_argument_that_is_set_after_the_trainer_was_made(tmp_path: Path, name: str, value: Any, words: str) -> None:
    """Steps were paid for before the optimizer refused what came of it."""
    run = make(tmp_path)
    setattr(run.args, name, value)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        run.train()
    assert run.ledger.steps == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "value"), [("gradient_accumulation_steps", 3), ("max_grad_norm", 1.0)])
@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
def test_an_argument_that_a_callback_sets(tmp_path: Path, event: str, name: str, value: Any) -> None:
    """A whole budget went into one step of the optimizer."""

    def set_it(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        setattr(args, name, value)

    run = make(tmp_path)
    run.add_callback(type("Setting", (TrainerCallback,), {event: set_it}))
    with pytest.raises(ConfigurationError, match=re.escape(f"trainer.args.{name}={value}, set after")):
        run.train()
    assert run.ledger.steps == run.state.global_step == (0 if event == "on_train_begin" else 1)


@pytest.mark.slow
def test_of_arguments_set_after_the_trainer_was_made_the_others_are_taken(tmp_path: Path) -> None:
    run = make(tmp_path)
    run.args.max_steps, run.args.per_device_train_batch_size = 3, 2
    run.train()
    assert run.ledger.steps == 3


@pytest.mark.parametrize("option", ["capturable=True", "differentiable=True", "SparseAdam"])
def test_an_optimizer_that_could_take_no_step(option: str, tmp_path: Path) -> None:
    model = classifier()
    optimizer = (
        torch.optim.SparseAdam(list(model.parameters()))
        if option == "SparseAdam"
        else torch.optim.AdamW(model.parameters(), **{option.split("=")[0]: True})
    )
    refused(tmp_path, ConfigurationError, option, model, at_once=False, parts={"optimizers": (optimizer, None)})
