"""Sparse embeddings in a private training: found, trained lazily, paid for, saved and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_dp import DPTrainer, SparseEmbeddingConfig, accounting
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError
from hf_dp.parts.sparse_embeddings.kept_rows import FILE, LABEL
from hf_dp.training.run import Run
from tests.architectures import VOCABULARY
from tests.parts.sparse_embeddings.sparse import FEST, WORDS, Watched, logged, sparse
from tests.training.workbench import (
    EXPECTED,
    STEPS,
    Clicks,
    NoWholeTable,
    Recommender,
    clicks,
    distance,
    make,
    parameters,
    private,
    rows,
    same,
    stack,
)

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": 2.0},
        FEST,
        {"method": "adafest+", "kept_rows": 9, "threshold": 2.0},
    ],
)
@pytest.mark.slow
def test_rows_without_a_gradient_do_not_move_and_the_budget_is_kept(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = sparse(tmp_path, sparse=settings, kind=Watched, logging_steps=1, optim="adamw_torch")
    before = parameters(trainer.model)
    trainer.train()
    after = parameters(trainer.model)
    assert list(trainer.sparse) == [WORDS]
    moved = (after[WORDS] != before[WORDS]).any(1)
    assert 0 < int(moved.sum()) < VOCABULARY
    if "kept_rows" in settings:
        assert int(moved.sum()) <= 9
    else:
        assert not moved[0]  # padding
    for name, value in after.items():
        assert not torch.equal(value, before[name]), name
    report = trainer.privacy_report()
    assert 2.97 < report.epsilon <= 3.0
    assert trainer.ledger.steps == STEPS
    survived = logged(trainer, "surviving_rows")
    density, reduction = logged(trainer, "gradient_density"), logged(trainer, "reduction_factor")
    assert len(survived) == STEPS
    assert density == pytest.approx([k / VOCABULARY for k in survived])
    assert reduction == pytest.approx([24 * VOCABULARY / max(1, 24 * k) for k in survived])
    assert all(0 <= f <= k for f, k in zip(logged(trainer, "false_positives"), survived, strict=True))
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "loss" in entry)
    assert trainer.sparse[WORDS] == survived[-1]


@pytest.mark.slow
def test_adafest_without_a_threshold_that_matters_is_dp_sgd(tmp_path: Path) -> None:
    """Everything survives where tau is tiny and nothing is noisy: the same weights as with dense gradients."""
    config = SparseEmbeddingConfig(threshold=1e-9, optimizer="sgd")
    with pytest.warns(UserWarning, match="not private"):
        quiet = private(noise_multiplier=0, sparse_embeddings=config)
    with pytest.warns(UserWarning, match="not private"):
        dense = private(noise_multiplier=0)
    trainers = [make(tmp_path / str(i), privacy=p) for i, p in enumerate((quiet, dense))]
    for trainer in trainers:
        trainer.train()
    assert distance(*(parameters(trainer.model) for trainer in trainers)) < 1e-6


@pytest.mark.slow
def test_micro_batches_do_not_matter(tmp_path: Path) -> None:
    found = []
    for micro in (1, 4, 8):
        trainer = sparse(
            tmp_path / str(micro),
            sparse={"threshold": 2.0},
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=EXPECTED // micro,
        )
        trainer.train()
        found.append(parameters(trainer.model))
    assert distance(found[0], found[1]) < 1e-5
    assert distance(found[0], found[2]) < 1e-5


@pytest.mark.slow
def test_empty_batches_are_steps_in_which_rows_survive_by_chance(tmp_path: Path) -> None:
    data = rows(200)
    trainer = make(
        tmp_path,
        privacy=private(noise_multiplier=1.0, sparse_embeddings=SparseEmbeddingConfig(threshold=3.0)),
        parts={"train_dataset": data},
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=12,
        logging_steps=1,
    )
    trainer.train()
    sizes = [len(trainer._plan.sampler.draw(step)) for step in range(12)]
    assert 0 in sizes
    chance = [f for f, size in zip(logged(trainer, "false_positives"), sizes, strict=True) if size == 0]
    assert sum(chance) > 0
    assert trainer.ledger.steps == 12


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({"threshold": 2.0}, "row_wise_adam"),
        ({**FEST, "renew_every": 1, "method": "adafest+"}, "sparse_adam"),
        ({"threshold": 2.0}, "sparse_adam"),
        (FEST, "row_wise_adam"),
        (FEST, "sparse_adam"),
        ({**FEST, "renew_every": 1, "method": "adafest+"}, "row_wise_adam"),
    ],
)
@pytest.mark.slow
def test_resumed_it_is_the_same_run(tmp_path: Path, settings: dict[str, Any], optimizer: str) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "lr_scheduler_type": "linear"}
    whole = sparse(tmp_path, sparse={**settings, "optimizer": optimizer}, **options)
    whole.train()
    again = sparse(tmp_path, sparse={**settings, "optimizer": optimizer}, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(parameters(whole.model), parameters(again.model))
    assert again.ledger == whole.ledger
    assert whole.lr_scheduler.get_last_lr() == again.lr_scheduler.get_last_lr()
    labels = [label for _, count, label in again.ledger.entries for _ in range(count)]
    assert labels.count(LABEL) == (0 if "kept_rows" not in settings else 4 if "renew_every" in settings else 1)


@pytest.mark.slow
def test_a_checkpoint_without_the_rows_or_under_another_promise_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    sparse(tmp_path, sparse=FEST, **options).train()
    checkpoint = tmp_path / "checkpoint-2"
    assert len(load_file(checkpoint / FILE)[f"rows/{WORDS}"]) == 9
    with pytest.raises(LedgerError, match="sparse_embeddings"):
        sparse(tmp_path, sparse={**FEST, "kept_rows": 8}).train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / FILE).unlink()
    with pytest.raises(LedgerError, match=f"it has no {FILE}, which"):
        sparse(tmp_path, sparse=FEST, **options).train(resume_from_checkpoint=str(checkpoint))


@contextmanager
def failing_from(step: int) -> Iterator[None]:
    """Gradients of that step, and of those after it, cannot be computed."""
    computed = Run._restricted

    def failing(run: Run, batch: Any) -> Any:
        if run.ledger.steps >= step:
            raise RuntimeError("once")
        return computed(run, batch)

    with mock.patch.object(Run, "_restricted", failing):
        yield


@pytest.mark.slow
def test_a_choice_that_was_made_is_not_made_again(tmp_path: Path) -> None:
    """A training that fails after its choice, and is begun again, keeps it; a second one is not paid for."""

    trainer = sparse(tmp_path, sparse=FEST)
    with failing_from(0), pytest.raises(RuntimeError, match="once"):
        trainer.train()
    assert [label for _, _, label in trainer.ledger.entries] == [LABEL]
    chosen = trainer._run.parts["sparse_embeddings"].choice.kept
    trainer.train()
    assert torch.equal(trainer._run.parts["sparse_embeddings"].choice.kept, chosen)
    assert [label for _, _, label in trainer.ledger.entries] == [LABEL, accounting.TRAINING_STEP]
    assert trainer.privacy_report().epsilon <= 3.0
    with pytest.raises(BudgetExceededError):
        trainer.train()


@pytest.mark.slow
def test_a_renewal_that_was_made_before_a_failure_is_charged_once_and_kept(tmp_path: Path) -> None:
    settings = {**FEST, "renew_every": 2}
    trainer = sparse(tmp_path, sparse=settings, save_strategy="steps", save_steps=2)
    with failing_from(2), pytest.raises(RuntimeError, match="once"):
        trainer.train()
    assert [label for _, _, label in trainer.ledger.entries] == [LABEL, accounting.TRAINING_STEP, LABEL]
    chosen = trainer._run.parts["sparse_embeddings"].choice.kept
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(trainer._run.parts["sparse_embeddings"].choice.kept, chosen)
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 2
    assert [made.times for made in trainer.privacy_report().releases] == [2]
    assert trainer.privacy_report().epsilon <= 3.0


@pytest.mark.parametrize("settings", [{"threshold": 2.0}, FEST])
@pytest.mark.slow
def test_nothing_as_large_as_the_table_is_made(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Neither in the check before the first step, nor in a step, nor in the optimizer."""
    parts = {"train_dataset": clicks(), "data_collator": stack}
    model = Recommender()
    model.items = nn.Embedding(30_000, 4)
    trainer = sparse(
        tmp_path, model, kind=Clicks, sparse=settings, parts=parts, remove_unused_columns=False, max_steps=2
    )
    with NoWholeTable(model.items.weight) as watching:
        trainer.train()
    assert not watching.found
    assert trainer.ledger.steps == 2
    # Negative control: dense noise makes several.
    model = Recommender()
    model.items = nn.Embedding(30_000, 4)
    dense = make(tmp_path, model, private(), kind=Clicks, parts=parts, remove_unused_columns=False, max_steps=1)
    with NoWholeTable(model.items.weight) as watching:
        dense.train()
    assert watching.found


@pytest.mark.slow
def test_public_rows_cost_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    settings = {"method": "fest", "row_choice": "public", "public_rows": str(file)}
    file.write_text(json.dumps([5, 9, 3]), encoding="utf-8")
    trainer = sparse(tmp_path / "a", sparse=settings)
    before = parameters(trainer.model)
    trainer.train()
    moved = (parameters(trainer.model)[WORDS] != before[WORDS]).any(1)
    assert moved.nonzero().squeeze(1).tolist() == [3, 5, 9]
    assert [label for _, _, label in trainer.ledger.entries] == [accounting.TRAINING_STEP]
    file.write_text(json.dumps({WORDS: [5]}), encoding="utf-8")
    sparse(tmp_path / "b", sparse=settings).train()
    for wrong in ("[]", "[1.5", "[99]", '{"other": [1]}', "[-1]"):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(ConfigurationError, match="public_rows"):
            sparse(tmp_path / "c", sparse=settings).train()


@pytest.mark.slow
def test_fest_chooses_the_frequent_rows_of_much_data(tmp_path: Path) -> None:
    data = [{"input_ids": [3 + i % 4, 7 + i % 29], "labels": i % 3} for i in range(400)]
    trainer = sparse(
        tmp_path,
        sparse={"method": "fest", "kept_rows": 4, "budget_share": 0.5},
        privacy={"target_epsilon": 30.0},
        parts={"train_dataset": data},
        max_steps=1,
    )
    trainer.train()
    assert trainer._run.parts["sparse_embeddings"].choice.kept.tolist() == [3, 4, 5, 6]


def test_what_fails_where_the_uses_of_tables_are_looked_up_is_refused(tmp_path: Path) -> None:
    class Failing(DPTrainer):
        def compute_per_example_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
            raise RuntimeError("of another size")

    trainer = sparse(tmp_path, sparse={"threshold": 2.0}, kind=Failing)
    with pytest.raises(ConfigurationError, match=r"failed in the model.*RuntimeError: of another size"):
        trainer.train()
    assert trainer.ledger.steps == 0


def test_failure_105_rows_that_were_chosen_are_not_dropped_for_a_checkpoint_of_another_trainer(tmp_path: Path) -> None:
    """Interrupted before its first step, and resumed where another choice of another process is the latest."""

    def made(steps: int) -> Any:
        promise = {"seed": None, "accountant": "rdp"}
        settings = {**FEST, "renew_every": 1}
        return sparse(tmp_path, privacy=promise, sparse=settings, save_strategy="steps", save_steps=2, max_steps=steps)

    made(2).train()
    trainer, checkpoint = made(2), str(tmp_path / "checkpoint-2")
    interrupted = mock.patch("hf_dp.training.run.private_gradient", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [label for _, _, label in trainer.ledger.entries] == [LABEL]
    with pytest.raises(LedgerError, match="has released embedding rows, and made no step"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert [label for _, _, label in trainer.ledger.entries] == [LABEL]
