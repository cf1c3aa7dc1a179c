"""Trainers and losses of one's own that would bypass the private step are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DistilBertForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError, PreflightError, UnsupportedModelError
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.refusing import refused
from tests.training.workbench import ROWS, classifier, make, private, rows


def test_what_only_seq2seq_trainer_does_is_not_ignored(tmp_path: Path) -> None:
    """`Seq2SeqTrainer` is not `DPTrainer`: its arguments alone would give logits to metrics of texts."""
    args = Seq2SeqTrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, per_device_train_batch_size=2, predict_with_generate=True
    )
    given: dict[str, Any] = {"model": classifier(), "args": args, "train_dataset": rows(), "privacy": private()}
    with pytest.raises(
        ConfigurationError, match="predict_with_generate=True, and DPTrainer does not generate"
    ) as found:
        DPTrainer(**given)
    assert "DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer)" in found.value.fix

    class Generates(DPTrainerMixin, Seq2SeqTrainer):
        pass

    Generates(**given)


class OwnStep(DPTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


class OwnLoader(DPTrainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class OwnBatches(DPTrainer):
    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_batch_samples(*args, **kwargs)


class WeightedSampler(DPTrainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.WeightedRandomSampler([1.0] * ROWS, ROWS)


class Behind(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class Batches(Trainer):
    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        return super().get_batch_samples(*args, **kwargs)


class BatchesBehind(DPTrainerMixin, Batches):  # type: ignore[misc]
    pass


class OwnLoss(DPTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnStep, "OwnStep.training_step"),
        (OwnLoader, "OwnLoader.get_train_dataloader"),
        (OwnBatches, "OwnBatches.get_batch_samples"),
        (BatchesBehind, "Batches.get_batch_samples stands behind"),
        (WeightedSampler, "WeightedSampler chooses its own training sampler"),
        (OwnLoss, "OwnLoss.compute_loss gives one loss for the whole batch"),
    ],
)
def test_failure_22_subclasses_that_would_bypass_the_private_step(tmp_path: Path, kind: Any, words: str) -> None:
    refused(tmp_path, ConfigurationError, words, kind=kind)


STEP: Any = DPTrainerMixin.training_step


class Twice(Trainer):
    """A loop of one's own, in which each batch is for two steps."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        def twice(trainer: Any, model: Any, inputs: Any, *given: Any) -> Tensor:
            found: Tensor = STEP(trainer, model, dict(inputs), *given) + STEP(trainer, model, dict(inputs), *given)
            return found

        with mock.patch.object(DPTrainerMixin, "training_step", twice):
            return super()._inner_training_loop(*args, **kwargs)


class FirstEpoch(Trainer):
    """The draws of the first epoch again and again."""

    def _run_epoch(self, model: Any, epoch: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._run_epoch(model, 0, *args, **kwargs)


class Others(Trainer):
    """Micro-batches that were not drawn."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        def of_others(trainer: Any, model: Any, inputs: Any, *given: Any) -> Any:
            return STEP(trainer, model, {"micro_batches": inputs["micro_batches"]}, *given)

        with mock.patch.object(DPTrainerMixin, "training_step", of_others):
            return super()._inner_training_loop(*args, **kwargs)


@pytest.mark.parametrize(
    ("base", "words", "steps"),
    [
        (Twice, "a logical batch of another step", 1),
        (FirstEpoch, "a logical batch of another step", 6),
        (Others, "no logical batch of the training loader", 0),
    ],
)
@pytest.mark.slow
def test_failure_54_each_draw_is_for_one_step(tmp_path: Path, base: Any, words: str, steps: int) -> None:
    run = make(tmp_path, kind=type("Private", (DPTrainerMixin, base), {}), max_steps=12)
    with pytest.raises(ConfigurationError, match=words):
        run.train()
    assert run.ledger.steps == steps


class AnotherModel(Trainer):
    """Steps with a model that nothing has checked."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        other = copy.deepcopy(self.model)
        with mock.patch.object(DPTrainerMixin, "training_step", lambda self, model, *given: STEP(self, other, *given)):
            return super()._inner_training_loop(*args, **kwargs)


@pytest.mark.slow
def test_no_step_is_of_another_model(tmp_path: Path) -> None:
    run = make(tmp_path, kind=type("Private", (DPTrainerMixin, AnotherModel), {}))
    with pytest.raises(ConfigurationError, match="is not the trainer's model"):
        run.train()
    assert not run.ledger.steps


@pytest.mark.parametrize("base", [Trainer, Behind])
def test_the_mixin_behind_the_trainer_is_refused_where_the_class_is_made(base: type) -> None:
    with pytest.raises(ConfigurationError, match=f"Last has {base.__name__} before DPTrainerMixin") as caught:
        type("Last", (base, DPTrainerMixin), {})
    assert f"class Last(DPTrainerMixin, {base.__name__})" in caught.value.fix


@pytest.mark.parametrize("model", ["gpt2", DistilBertForSequenceClassification])
def test_what_is_no_model_yet(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^model=.*, which is no torch module") as caught:
        make(tmp_path, model)
    assert "from_pretrained" in caught.value.fix


def test_what_is_no_training_arguments(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": classifier(), "args": str(tmp_path), "train_dataset": rows()}
    with pytest.raises(ConfigurationError, match=r"^args=.*, which is no TrainingArguments"):
        DPTrainer(**given, privacy=private())


def test_an_argument_that_is_missing_or_has_another_name_now(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": classifier(), "args": TrainingArguments(str(tmp_path)), "train_dataset": rows()}
    with pytest.raises(ConfigurationError, match="DPTrainer without privacy.") as caught:
        DPTrainer(**given)
    assert "give privacy=PrivacyConfig(target_epsilon=8.0)" in caught.value.fix
    with pytest.raises(ConfigurationError, match="tokenizer=, which trainers do not have any more.") as caught:
        DPTrainer(**given, privacy=private(), tokenizer=None)
    assert "processing_class=" in caught.value.fix
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_seq_length'"):
        DPTrainer(**{**given, "model": "a name"}, privacy=private(), max_seq_length=5)


class Named(Trainer):
    def __init__(self, model: Any, **given: Any) -> None:
        super().__init__(classifier() if model == "small" else model, **given)


def test_a_trainer_of_ones_own_may_make_its_model_of_a_name(tmp_path: Path) -> None:
    name: Any = "small"
    assert isinstance(make(tmp_path, name, kind=type("Private", (DPTrainerMixin, Named), {})).model, nn.Module)


def test_a_loss_function_for_the_whole_batch(tmp_path: Path) -> None:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits, labels)

    refused(tmp_path, ConfigurationError, "compute_loss_func", parts={"compute_loss_func": mean})


class MeanLoss(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return super().compute_per_example_loss(model, inputs).mean()


class SharedDenominator(DPTrainer):
    """Failure 3 by the user's own hand: normalised over the batch."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = super().compute_per_example_loss(model, inputs)
        return losses / inputs["attention_mask"].sum()


class ConstantLoss(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return torch.zeros(len(inputs["input_ids"]))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (MeanLoss, ConfigurationError, r"returned \(\) of torch.float32, not"),
        (SharedDenominator, PreflightError, "neighbours|in a batch"),
        (ConstantLoss, UnsupportedModelError, "does not depend on any trainable parameter"),
    ],
)
def test_losses_that_are_not_one_for_each_example(tmp_path: Path, kind: Any, error: Any, words: str) -> None:
    refused(tmp_path, error, words, kind=kind, at_once=False)
