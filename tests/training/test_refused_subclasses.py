"""Trainers and losses of one's own that would bypass the private step are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError, PreflightError, UnsupportedModelError
from hf_dp.training.trainer import DPTrainerMixin
from tests.training.refusing import refused
from tests.training.workbench import ROWS, make


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


class MixinLast(Behind, DPTrainerMixin):  # type: ignore[misc]
    pass


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


class Twice(Trainer):
    """A loop of one's own, in which each batch is for two steps."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        step = self.training_step

        def twice(*given: Any) -> Tensor:
            return step(*given) + step(*given)

        self.training_step = twice  # type: ignore[method-assign]
        return super()._inner_training_loop(*args, **kwargs)


def test_no_batch_is_for_two_steps(tmp_path: Path) -> None:
    kind: Any = type("Private", (DPTrainerMixin, Twice), {})
    run = make(tmp_path, kind=kind)
    with pytest.raises(ConfigurationError, match="used in another step"):
        run.train()
    assert run.ledger.steps == 1


def test_the_mixin_behind_the_trainer_does_not_train_unnoticed(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ConfigurationError)):
        make(tmp_path, kind=MixinLast)


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


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (MeanLoss, ConfigurationError, r"returned \(\), not"),
        (SharedDenominator, PreflightError, "neighbours|in a batch"),
        (ConstantLoss, UnsupportedModelError, "does not depend on any trainable parameter"),
    ],
)
def test_losses_that_are_not_one_for_each_example(tmp_path: Path, kind: Any, error: Any, words: str) -> None:
    refused(tmp_path, error, words, kind=kind, at_once=False)
