"""Sparse embeddings in a private training: found, trained lazily, paid for, logged, saved, resumed, refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_dp import DPTrainer, PrivacyConfig, SparseEmbeddingConfig, accounting
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError, UnsupportedModelError
from hf_dp.parts.sparse_embeddings import LazyRows, RowWiseAdam
from hf_dp.parts.sparse_embeddings.kept_rows import FILE, LABEL
from hf_dp.training.run import Run
from tests.training.workbench import (
    EXPECTED,
    ROWS,
    STEPS,
    Clicks,
    NoWholeTable,
    Recommender,
    Trajectory,
    classifier,
    clicks,
    distance,
    make,
    pad,
    pad_for_language,
    parameters,
    private,
    rows,
    same,
    stack,
)
from tests.zoo import VOCABULARY, tiny

pytestmark = pytest.mark.usefixtures("checked_once")

WORDS = "distilbert.embeddings.word_embeddings.weight"
FEST = {"method": "fest", "kept_rows": 9}


def sparse(path: Path, model: Any = None, privacy: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A trainer with sparse embeddings; settings of the config as `sparse=`, of the promise as `privacy=`."""
    config = SparseEmbeddingConfig(**changes.pop("sparse", {}))
    promise = {"noise_multiplier": None, "target_epsilon": 3.0, **(privacy or {})}
    return make(path, model, private(sparse_embeddings=config, **promise), **changes)


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[f"sparse_embeddings/{name}"] for entry in trainer.state.log_history if "loss" in entry]


class Watched(DPTrainer):
    """Remembers which gradients were sparse, and how many rows they had."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.sparse = {name: g._nnz() for name, g in found.items() if g.is_sparse}
        return super()._get_grad_norm(model, grad_norm)


@pytest.mark.parametrize(
    "settings", [{"threshold": 2.0}, FEST, {"method": "adafest+", "kept_rows": 9, "threshold": 2.0}]
)
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
        pytest.param({"threshold": 2.0}, "sparse_adam", marks=pytest.mark.slow),
        pytest.param(FEST, "row_wise_adam", marks=pytest.mark.slow),
        pytest.param(FEST, "sparse_adam", marks=pytest.mark.slow),
        pytest.param({**FEST, "renew_every": 1, "method": "adafest+"}, "row_wise_adam", marks=pytest.mark.slow),
    ],
)
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


def test_a_checkpoint_without_the_rows_or_under_another_promise_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    sparse(tmp_path, sparse=FEST, **options).train()
    checkpoint = tmp_path / "checkpoint-2"
    assert len(load_file(checkpoint / FILE)[f"rows/{WORDS}"]) == 9
    with pytest.raises(LedgerError, match="sparse_embeddings"):
        sparse(tmp_path, sparse={**FEST, "kept_rows": 8}).train(resume_from_checkpoint=str(checkpoint))
    (checkpoint / FILE).unlink()
    with pytest.raises(LedgerError, match=f"{FILE}: named in the record, but not there"):
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


# --- other models ---------------------------------------------------------------------------------------------------


class WatchedClicks(Watched, Clicks):
    """Both."""


@pytest.mark.parametrize("method", [{"threshold": 2.0}, {"method": "fest", "kept_rows": 30}])
def test_several_tables_share_one_choice(tmp_path: Path, method: dict[str, Any]) -> None:
    parts = {"train_dataset": clicks(), "data_collator": stack}
    trainer = sparse(
        tmp_path,
        Recommender(),
        kind=WatchedClicks,
        sparse=method,
        parts=parts,
        logging_steps=1,
        remove_unused_columns=False,
    )
    trainer.train()
    assert list(trainer.sparse) == ["items.weight", "users.weight"]
    survived = logged(trainer, "surviving_rows")
    assert sum(trainer.sparse.values()) == survived[-1]
    items, users = trainer.sparse.values()
    density = logged(trainer, "gradient_density")[-1]
    assert density == pytest.approx((4 * items + 3 * users) / (3000 * 4 + 1200 * 3))


def test_an_embedding_bag_is_refused(tmp_path: Path) -> None:
    class Bag(Recommender):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.EmbeddingBag(3000, 4)

        def forward(self, features: Tensor) -> Tensor:
            parts = [self.items(features[:, :1]), self.users(features[:, 1]), self.days(features[:, 2])]
            logits: Tensor = self.head(torch.cat(parts, dim=1))
            return logits

    parts = {"train_dataset": clicks(), "data_collator": stack}
    trainer = sparse(tmp_path, Bag(), kind=Clicks, parts=parts, remove_unused_columns=False)
    with pytest.raises(UnsupportedModelError, match="embedding_bag"):
        trainer.train()
    assert trainer.ledger.steps == 0


@pytest.mark.parametrize("embedding", ["word_embeddings"])
def test_lora_on_everything_else_and_a_sparse_embedding(tmp_path: Path, embedding: str) -> None:
    lora = LoraConfig(r=2, target_modules=["q_lin"], modules_to_save=[embedding, "classifier"], task_type="SEQ_CLS")
    model = get_peft_model(classifier(), lora)
    trainer = sparse(tmp_path, model, kind=Watched, sparse={"threshold": 2.0})
    before = parameters(model)
    trainer.train()
    (name,) = trainer.sparse
    assert "word_embeddings.modules_to_save" in name
    moved = (parameters(model)[name] != before[name]).any(1)
    assert 0 < int(moved.sum()) < VOCABULARY
    trainer.save_model(str(tmp_path / "adapter"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (kept,) = (value for key, value in saved.items() if "word_embeddings" in key)
    assert torch.equal(kept, parameters(model)[name])


def test_lora_around_the_same_table_is_refused(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_lin", "word_embeddings"], task_type="SEQ_CLS")
    trainer = sparse(tmp_path, get_peft_model(classifier(), lora))
    with pytest.raises(UnsupportedModelError, match="LoRA around an embedding"):
        trainer.train()


def test_a_tied_output_embedding_is_refused_and_an_untied_one_trains(tmp_path: Path) -> None:
    parts = {"data_collator": pad_for_language}
    with pytest.raises(UnsupportedModelError, match="also used by linear") as refused:
        sparse(tmp_path, tiny("gpt2", "causal_lm", torch.float32), parts=parts).train()
    assert "untie" in str(refused.value)
    untied = tiny("llama", "causal_lm", torch.float32)
    trainer = sparse(tmp_path, untied, kind=Watched, parts=parts, sparse={"threshold": 2.0})
    trainer.train()
    assert list(trainer.sparse) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"bf16": True}])
def test_checkpointing_and_bf16(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = tiny("llama", "causal_lm", torch.float32)
    trainer = sparse(tmp_path, model, kind=Watched, parts={"data_collator": pad_for_language}, **changes)
    trainer.train()
    assert list(trainer.sparse) == ["model.embed_tokens.weight"]


# --- optimizers and logs --------------------------------------------------------------------------------------------


def test_weight_decay_and_momentum_on_rows_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    trainers = [sparse(tmp_path, weight_decay=0.1)]
    for kind, settings in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})):
        model = classifier()
        own = kind(model.parameters(), **settings)  # type: ignore[operator]
        trainers.append(sparse(tmp_path, model, parts={"optimizers": (own, None)}))
    for trainer in trainers:
        with pytest.raises(ConfigurationError, match="weight_decay"):
            trainer.train()
        assert not trainer.ledger.entries


def test_an_optimizer_of_ones_own_is_completed_by_a_lazy_one(tmp_path: Path) -> None:
    model = classifier()
    others = [p for name, p in model.named_parameters() if name != WORDS]
    own = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    steps = Trajectory()
    trainer = sparse(
        tmp_path,
        model,
        sparse={"threshold": 2.0, "learning_rate": 0.5},
        parts={"optimizers": (own, None), "callbacks": [steps]},
        lr_scheduler_type="linear",
    )
    trainer.train()
    both = trainer.optimizer.optimizer
    assert isinstance(both, LazyRows)
    assert both.rest is own
    assert isinstance(both.rows, RowWiseAdam)
    assert [group["initial_lr"] for group in both.param_groups] == [0.01, 0.5]
    assert len(steps.points) == STEPS + 1


def test_withheld_logs_hold_nothing_that_is_not_released(tmp_path: Path) -> None:
    trainer = sparse(tmp_path, privacy={"withhold_non_private_logs": True}, logging_steps=1)
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry}
    assert "sparse_embeddings/surviving_rows" in names
    assert "sparse_embeddings/false_positives" not in names


def test_too_many_rows_to_keep_and_names_of_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="kept_rows=37"):
        sparse(tmp_path, sparse={**FEST, "kept_rows": VOCABULARY}).train()
    with pytest.raises(ConfigurationError, match="no matrix"):
        sparse(tmp_path, sparse={"tables": ("words",)}).train()


def test_frozen_embeddings_are_refused(tmp_path: Path) -> None:
    model = classifier()
    model.distilbert.embeddings.word_embeddings.weight.requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="no trained embedding table"):
        sparse(tmp_path, model).train()


def test_the_promise_of_a_run_without_noise_on_rows_is_infinite(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not private"):
        promise = PrivacyConfig(noise_multiplier=0, seed=1, sparse_embeddings=SparseEmbeddingConfig(threshold=2.0))
    trainer = make(tmp_path, privacy=promise, parts={"data_collator": pad})
    trainer.train()
    assert trainer.privacy_report().epsilon == float("inf")
    assert trainer._plan.sampler.dataset_size == ROWS


def test_an_optimizer_that_was_made_without_looking_for_tables_is_refused_before_a_step(tmp_path: Path) -> None:
    class Own(DPTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trainer = sparse(tmp_path, kind=Own)
    with pytest.raises(ConfigurationError, match="without looking for their tables"):
        trainer.train()
    assert trainer.ledger.charges == 0
