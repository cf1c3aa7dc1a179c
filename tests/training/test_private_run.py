"""PrivateRun: a loop of one's own gives DPTrainer's weights, bit for bit, and resumes; wrong loops are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_dp import DPTrainer, PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError
from hf_dp.hub import verify
from tests.training.own_loops import STEPS, a_run, begun, loop
from tests.training.workbench import Recommender, classifier, clicks, make, parameters, private, rows, same, stack

pytestmark = pytest.mark.usefixtures("checked_once")

PARTS: dict[str, dict[str, Any]] = {
    "none": {},
    "Re-Attention": {"re_attention": ReAttentionConfig(token_frequencies="uniform")},
    "sparse embeddings": {"sparse_embeddings": SparseEmbeddingConfig(threshold=1.0)},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.slow
def test_a_loop_of_ones_own_trains_as_trainer_does(tmp_path: Path, part: str) -> None:
    privacy, found, ledgers = private(**PARTS[part]), [], []
    torch.manual_seed(0)
    first = classifier(dropout=0.1)
    for own in (True, False):
        model = copy.deepcopy(first)
        torch.manual_seed(42)
        if own:
            run = a_run(model, privacy)
            optimizer = run.make_optimizer(lambda trained: torch.optim.SGD(trained, lr=0.1))
            run.begin(optimizer)
            for batch in run.batches():
                model.eval()
                run.step(batch)
                optimizer.step()
            ledgers.append(run.ledger)
        else:
            trainer: DPTrainer = make(tmp_path, model, privacy, max_steps=STEPS)
            torch.manual_seed(42)
            trainer.train()
            ledgers.append(trainer.ledger)
        found.append(parameters(model))
    assert same(*found)
    assert ledgers[0] == ledgers[1]
    assert ledgers[0].steps == STEPS


@pytest.mark.parametrize("part", ["none", *list(PARTS)[1:]])
@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.slow
def test_resumed_it_goes_on_as_if_there_had_been_no_break(tmp_path: Path, part: str, at: int) -> None:
    privacy = private(**PARTS[part])
    model = classifier(dropout=0.1)
    again = copy.deepcopy(model)
    torch.manual_seed(1)
    run, optimizer, scheduler = begun(model, privacy, output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=at)
    torch.manual_seed(2)
    resumed, optimizer, scheduler = begun(again, privacy, output_dir=tmp_path, resume=True)
    assert resumed.global_step == resumed.ledger.steps == at
    loop(resumed, optimizer, scheduler)
    assert same(parameters(model), parameters(again))
    assert run.ledger == resumed.ledger
    assert run.report() == resumed.report()


def test_a_saved_model_is_verified_and_lies_beside_its_record(tmp_path: Path) -> None:
    run, optimizer, scheduler = begun(classifier(), PrivacyConfig(target_epsilon=8.0), steps=2, output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=1)
    run.save(tmp_path / "final")
    for folder, steps in (("final", 2), ("checkpoint-1", 1)):
        assert verify(tmp_path / folder).consistent
        assert verify(tmp_path / folder).report.steps == steps
    assert run.report().epsilon <= 8.0
    assert run.logs().keys() >= {"epsilon", "noise_multiplier", "clipped_fraction"}


@pytest.mark.slow
def test_a_plain_module_with_a_loss_of_its_own(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["features"]), batch["labels"], reduction="none")

    models = [Recommender(), Recommender()]
    for model, resume in zip(models, (None, tmp_path / "checkpoint-3"), strict=True):
        run, optimizer, scheduler = begun(
            model, loss=loss, dataset=clicks(), collate=stack, output_dir=tmp_path, resume=resume
        )
        loop(run, optimizer, scheduler, save_at=3)
    assert same(*map(parameters, models))
    run.save(tmp_path / "final")
    assert verify(tmp_path / "final").consistent


@pytest.mark.slow
def test_a_run_ends_with_its_budget_and_a_checkpoint_counts_what_was_spent(tmp_path: Path) -> None:
    privacy = PrivacyConfig(target_epsilon=8.0, seed=3)
    run, optimizer, scheduler = begun(classifier(), privacy, steps=2, output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=1)
    assert list(run.batches()) == []
    assert not run.budget_is_left
    spent, optimizer, scheduler = begun(classifier(), privacy, steps=2, output_dir=tmp_path, resume=True)
    # As after a break in the middle of a step: the ledger has it, the weights have not.
    spent.ledger.charge(spent._run.plan.event)
    loop(spent, optimizer, scheduler)
    assert spent.global_step == 1
    assert not spent.budget_is_left
    with pytest.raises(ConfigurationError, match="has ended"):
        spent._run.step({"micro_batches": []})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expected_batch_size": 0}, "expected_batch_size=0"),
        ({"micro_batch_size": 2.5}, "micro_batch_size=2.5"),
        ({"steps": True}, "steps=True"),
        ({"dataset": {"train": rows()}}, "with the keys train"),
        ({"dataset": iter(rows())}, "can only be iterated"),
        ({"expected_batch_size": 64}, "an expected batch of 64 from"),
        ({"privacy": 8.0}, "privacy=8.0"),
    ],
)
def test_settings_are_refused_as_those_of_a_trainer(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        a_run(classifier(), **change)


def test_models_processes_and_optimizers_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier()
    for wrapped, words in (
        (nn.DataParallel(model), "DataParallel"),
        (torch.compile(model), "OptimizedModule"),
        ("gpt2", "str for a model"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            a_run(wrapped)
    run = a_run(model)
    schedule_free = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule_free.param_groups[0]["train_mode"] = True
    scaled: Any = type("Wrapped", (), {"optimizer": torch.optim.SGD(model.parameters()), "scaler": object()})()
    for optimizer, words in (
        (torch.optim.SGD, "type for an optimizer"),
        (schedule_free, "exchanges weights between training and evaluation"),
        (scaled, "fp16"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS evaluates the gradient several times"),
        (torch.optim.SGD([nn.Parameter(torch.zeros(2))]), "none of the model's trainable"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            run.begin(optimizer)
    for too_early in (run.batches, lambda: run.step(None), lambda: run.save("nowhere")):
        with pytest.raises(ConfigurationError, match="has not begun"):
            too_early()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="no process group"):
        a_run(model)


def test_a_beginning_that_was_refused_can_be_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConfigurationError("padding", why="a test", fix="none")

    model = classifier()
    run = a_run(model, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("hf_dp.training.checks.check_padding", refuse)
        with pytest.raises(ConfigurationError, match="padding"):
            run.begin(optimizer)
    assert not run.ledger.entries
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert run.ledger.steps == run.global_step == 1
