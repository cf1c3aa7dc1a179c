"""What is saved beside the weights is as the steps of a trainer left it: statistics that a callback takes stay here."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_dp import DPTrainer
from hf_dp.errors import ConfigurationError
from tests.training.workbench import make

pytestmark = pytest.mark.usefixtures("checked_once")
STEPS = 3


class Normed(nn.Module):
    """A norm that is kept still, in front of a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("rate", torch.zeros(1), persistent=False)
        self.norm.requires_grad_(False)

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class OfNormed(DPTrainer):
    def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
        found = model(**inputs)["logits"]
        return nn.functional.cross_entropy(found, inputs["labels"], reduction="none")


def data() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=draw) + 5, "labels": i % 3} for i in range(48)]


def stacked(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "x": torch.stack([one["x"] for one in examples]), "labels": torch.tensor([one["labels"] for one in examples])
    }  # fmt: skip


def update_statistics(model: Any) -> None:
    """As torch.optim.swa_utils.update_bn does."""
    model.norm.train()
    with torch.no_grad():
        model.norm(stacked(data())["x"])
    model.norm.eval()


def add_a_buffer(model: Any) -> None:
    model.register_buffer("mean", stacked(data())["x"].mean(0))


class At(TrainerCallback):
    def __init__(self, event: str, step: int, act: Any) -> None:
        self.step, self.act = step, act
        setattr(self, event, self.do)

    def do(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act(model)


def trainer_with(path: Path, callback: Any, **changes: Any) -> Any:
    parts = {"train_dataset": data(), "data_collator": stacked, "callbacks": [callback], "eval_dataset": data()[:8]}
    settings = {"max_steps": STEPS, "remove_unused_columns": False, **changes}
    return make(path, Normed(), kind=OfNormed, parts=parts, **settings)


@pytest.mark.parametrize("act", [update_statistics, add_a_buffer])
def test_no_step_follows_what_a_callback_writes_into_a_saved_buffer(tmp_path: Path, act: Any) -> None:
    trainer = trainer_with(tmp_path, At("on_step_end", 1, act))
    with pytest.raises(ConfigurationError, match=r"has changed the saved buffer (norm\.\w+|mean)"):
        trainer.train()
    assert trainer.ledger.steps == 1
    with pytest.raises(ConfigurationError, match="saving a model, after something else"):
        trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_nor_is_it_in_a_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, At("on_step_end", 1, update_statistics), save_strategy="steps", save_steps=1)
    with pytest.raises(ConfigurationError, match="saving a model, after something else"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_train_end"])
def test_nor_in_what_is_saved_when_the_last_step_was_made(tmp_path: Path, event: str) -> None:
    trainer = trainer_with(tmp_path, At(event, STEPS, update_statistics))
    trainer.train()
    with pytest.raises(ConfigurationError, match="saving a model, after something else"):
        trainer.save_model(str(tmp_path / "model"))
    trainer.model = nn.Sequential(trainer.model.norm, trainer.model.head)  # as what an adapter is merged into
    with pytest.raises(ConfigurationError, match="saving a model, after something else"):
        trainer.save_model(str(tmp_path / "model"))


@pytest.mark.parametrize("step", [0, 1])
def test_nor_what_is_written_between_a_private_step_and_that_of_the_optimizer(tmp_path: Path, step: int) -> None:
    trainer = trainer_with(tmp_path, At("on_pre_optimizer_step", step, update_statistics))
    with pytest.raises(ConfigurationError, match="a private step, after .* has changed the saved buffer norm"):
        trainer.train()
    assert trainer.ledger.steps == step + 1


def test_nor_what_is_written_there_in_the_last_step(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, At("on_pre_optimizer_step", STEPS - 1, update_statistics))
    trainer.train()
    with pytest.raises(ConfigurationError, match="saving a model, after .* has changed the saved buffer norm"):
        trainer.save_model(str(tmp_path / "model"))


def test_a_training_does_not_begin_with_what_another_left_changed(tmp_path: Path) -> None:
    """It would be paid for, and refused when it is saved."""
    trainer = trainer_with(tmp_path, callback := At("on_train_end", STEPS, update_statistics))
    trainer.train()
    trainer.remove_callback(callback)
    with pytest.raises(ConfigurationError, match="training a model, after something else"):
        trainer.train()
    assert trainer.ledger.steps == STEPS


def test_a_checkpoint_from_before_the_change_goes_on_in_the_same_model(tmp_path: Path) -> None:
    callback = At("on_step_end", 2, update_statistics)
    trainer = trainer_with(tmp_path, callback, save_strategy="steps", save_steps=1)
    with pytest.raises(ConfigurationError, match="saving a model, after something else"):
        trainer.train()
    trainer.remove_callback(callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "privacy.json").exists()


def test_copies_what_is_not_saved_and_evaluations_are_let_pass(tmp_path: Path) -> None:
    def harmless(model: Any) -> None:
        update_statistics(copy.deepcopy(model))
        model.rate.fill_(1.0)
        model.norm.running_mean.mul_(1)

    trainer = trainer_with(tmp_path, At("on_step_end", 1, harmless), eval_strategy="steps", eval_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "privacy.json").exists()
