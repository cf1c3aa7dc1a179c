"""While a trainer trains privately, no other optimizer moves the weights of its model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_dp.errors import ConfigurationError
from tests.training.own_loops import a_run
from tests.training.workbench import arguments, classifier, make, pad, parameters, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")


def by_an_optimizer(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**pad(rows(8))).loss.backward()
    optimizer.step()


def by_a_fused_one(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(**pad(rows(8))).loss.backward()
    optimizer.step()


def by_one_that_asks_for_gradients(model: nn.Module) -> None:
    """As LBFGS, and loops that give a closure: before its step there are none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()

    def closure() -> Any:
        loss = model(**pad(rows(8))).loss
        loss.backward()
        return loss

    optimizer.step(closure)


def of_what_is_frozen(model: nn.Module) -> None:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        optimizer = torch.optim.SGD(frozen, lr=0.5)
        model(**pad(rows(8))).loss.backward()
        optimizer.step()
    finally:
        for p in frozen:
            p.requires_grad_(False)


class Between(TrainerCallback):
    """After the first step."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.act(model)


ACTS = [by_an_optimizer, by_a_fused_one, by_one_that_asks_for_gradients, of_what_is_frozen]


@pytest.mark.parametrize("act", ACTS)
def test_an_optimizer_of_a_callback_moves_nothing(tmp_path: Path, act: Callable[[Any], None]) -> None:
    model = classifier()
    for p in model.distilbert.embeddings.parameters():
        p.requires_grad_(False)
    before = []

    def between(found: Any) -> None:
        before.append(parameters(found))
        act(found)

    trainer = make(tmp_path, model, parts={"callbacks": [Between(between)]})
    with pytest.raises(ConfigurationError, match="on weights of a private training that is at work"):
        trainer.train()
    assert trainer.ledger.steps == 1
    assert same(before[0], parameters(model))
    trainer.save_model(str(tmp_path / "model"))


def test_nor_does_a_trainer_without_privacy(tmp_path: Path) -> None:
    def train(model: Any) -> None:
        Trainer(
            model=model, args=arguments(tmp_path / "plain", max_steps=1), train_dataset=rows(8), data_collator=pad
        ).train()

    trainer = make(tmp_path, parts={"callbacks": [Between(train)]})
    with pytest.raises(ConfigurationError, match="SGD.step.* on weights of a private training that is at work"):
        trainer.train()


def test_nor_a_private_loop_that_began_before_it(tmp_path: Path) -> None:
    """Its steps would be saved under the ledger of the trainer, which has none of them."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Both(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.run = a_run(model)
            self.run.begin(optimizer)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.run.step(next(self.run.batches()))
            optimizer.step()

    before = parameters(model)
    trainer = make(tmp_path, model, parts={"callbacks": [both := Both()]})
    with pytest.raises(ConfigurationError, match="on weights of a private training that is at work"):
        trainer.train()
    both.run.end()
    assert same(before, parameters(model))


def test_a_copy_may_be_trained_and_the_model_itself_when_the_training_has_ended(tmp_path: Path) -> None:
    model = classifier()
    trainer = make(tmp_path, model, parts={"callbacks": [Between(lambda found: by_an_optimizer(copy.deepcopy(found)))]})
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    by_an_optimizer(model)


def test_a_loop_of_ones_own_that_was_left_is_told_of_when_it_goes_on() -> None:
    """It holds its weights against those of its latest step itself; what trains them after it may not know of it."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = a_run(model)
    run.begin(optimizer)
    by_an_optimizer(model)
    with pytest.raises(ConfigurationError, match="something else than the run's optimizer has changed"):
        run.step(next(run.batches()))
    run.end()
