"""One training by itself: what it accounts for, and when it has begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import hf_dp.training.checks as checks_module
from hf_dp import DPTrainer, PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.data.left_padding import LeftPadding
from hf_dp.errors import ConfigurationError
from hf_dp.losses import per_example_losses
from hf_dp.training.engine import Engine
from hf_dp.training.planned import planned
from hf_dp.training.run import Run
from tests.training.workbench import EXPECTED, MICRO, classifier, make, pad, parameters, private, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")

STEPS = 4
PARTS: dict[str, dict[str, Any]] = {
    "Re-Attention": {"re_attention": ReAttentionConfig(token_frequencies="uniform")},
    "sparse embeddings": {"sparse_embeddings": SparseEmbeddingConfig(threshold=1.0)},
}


def own_run(model: nn.Module, privacy: PrivacyConfig) -> Run:
    padding = LeftPadding()
    plan, loader = planned(
        privacy, model, rows(), pad, expected_batch_size=EXPECTED, micro_batch_size=MICRO, steps=lambda _: STEPS
    )
    return Run(plan, Engine(model, per_example_losses, loader, lambda b: padding.completed(model, b), padding))


def trained(run: Run, rate: float = 0.1) -> torch.optim.Optimizer:
    """In ten lines of plain torch."""
    optimizer = run.make_optimizer(
        lambda: torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=rate), None
    )
    run.go_on(run.ledger, None, run.loader.dataset.dataset, owner=run)
    run.begin(optimizer, None, 0, owner=run)
    while run.budget_is_left and run.ledger.steps < STEPS:
        for item in run.loader:
            if run.ledger.steps == STEPS:
                break
            run.model.train()
            run.step(item)
            optimizer.step()
            run.after_optimizer_step(optimizer)
            optimizer.zero_grad()
    run.end()
    return optimizer


def test_a_run_that_has_not_begun_accounts_for_nothing() -> None:
    first = own_run(classifier(), private())
    assert first.begun is None
    trained(first)
    later = Run(first.plan, first.engine, first)
    assert first.begun is later.begun is first


class Peeking(TrainerCallback):
    """Looks at the training batches while a training is at work."""

    trainer: DPTrainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.get_train_dataloader()


def test_a_loader_that_is_asked_for_in_between_is_of_no_training(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [Peeking()]):
        torch.manual_seed(0)
        trainer: DPTrainer = make(tmp_path, classifier(), parts={"callbacks": callbacks}, max_steps=2)
        Peeking.trainer = trainer
        trainer.train()
        found.append(parameters(trainer.model))
        assert trainer.ledger.steps == trainer.privacy_report().steps == 2
    assert same(*found)


def test_an_optimizer_that_is_made_too_early_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    trainer: DPTrainer = make(tmp_path, classifier(), private(**PARTS["sparse embeddings"]), optim="adamw_torch")
    trainer.create_optimizer()
    with pytest.raises(ConfigurationError, match="AdamW holds the embedding table"):
        trainer.train()
    assert not trainer.ledger.entries
    plain: DPTrainer = make(tmp_path, classifier(), max_steps=1)
    optimizer = plain.create_optimizer()
    plain.train()
    assert plain.optimizer.optimizer is optimizer


def begin(run: Run) -> None:
    optimizer = run.make_optimizer(lambda: torch.optim.SGD(run.model.parameters(), lr=0.1), None)
    run.go_on(run.ledger, None, run.loader.dataset.dataset, owner=run)
    run.begin(optimizer, None, 0, owner=run)


def test_no_step_of_a_training_whose_beginning_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConfigurationError("padding", why="a test", fix="none")

    run = own_run(classifier(), private())
    monkeypatch.setattr(checks_module, "check_padding", refuse)
    with pytest.raises(ConfigurationError, match="padding"):
        begin(run)
    with pytest.raises(ConfigurationError, match="has not begun"):
        run.step(next(iter(run.loader)))
    assert run.ledger.steps == 0
    assert run.begun is None


def test_parts_that_exclude_one_another_are_refused_without_trainer_too() -> None:
    run = own_run(classifier(), private(**PARTS["Re-Attention"], **PARTS["sparse embeddings"]))
    with pytest.raises(ConfigurationError, match="together"):
        begin(run)
