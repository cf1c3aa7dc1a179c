"""Tables of other models, and optimizers of one's own: trained lazily, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_dp import DPTrainer, PrivacyConfig, SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.parts.sparse_embeddings import LazyRows, RowWiseAdam
from tests.architectures import VOCABULARY
from tests.parts.sparse_embeddings.sparse import FEST, WORDS, Watched, logged, sparse
from tests.training.workbench import (
    ROWS,
    STEPS,
    Clicks,
    Recommender,
    Trajectory,
    classifier,
    clicks,
    make,
    pad,
    pad_for_language,
    parameters,
    stack,
)
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


class WatchedClicks(Watched, Clicks):
    """Both."""


@pytest.mark.parametrize("method", [{"threshold": 2.0}, {"method": "fest", "kept_rows": 30}])
@pytest.mark.slow
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


def test_bags_of_embeddings_are_looked_up_in_a_table(tmp_path: Path) -> None:
    class Bag(Recommender):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.EmbeddingBag(3000, 4)

        def forward(self, features: Tensor) -> Tensor:
            parts = [self.items(features[:, :1]), self.users(features[:, 1]), self.days(features[:, 2])]
            logits: Tensor = self.head(torch.cat(parts, dim=1))
            return logits

    parts = {"train_dataset": clicks(), "data_collator": stack}
    trainer = sparse(tmp_path, Bag(), kind=WatchedClicks, parts=parts, remove_unused_columns=False)
    trainer.train()
    assert list(trainer.sparse) == ["items.weight", "users.weight"]


@pytest.mark.parametrize("embedding", ["word_embeddings"])
@pytest.mark.slow
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


@pytest.mark.slow
def test_a_tied_output_embedding_is_refused_and_an_untied_one_trains(tmp_path: Path) -> None:
    parts = {"data_collator": pad_for_language}
    with pytest.raises(UnsupportedModelError, match="also used by linear") as refused:
        sparse(tmp_path, tiny("gpt2", "causal_lm", torch.float32, n_layer=1), parts=parts).train()
    assert "untie" in str(refused.value)
    untied = tiny("llama", "causal_lm", torch.float32, num_hidden_layers=1)
    trainer = sparse(tmp_path, untied, kind=Watched, parts=parts, sparse={"threshold": 2.0})
    trainer.train()
    assert list(trainer.sparse) == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"bf16": True}])
@pytest.mark.slow
def test_checkpointing_and_bf16(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = tiny("llama", "causal_lm", torch.float32, num_hidden_layers=1)
    trainer = sparse(tmp_path, model, kind=Watched, parts={"data_collator": pad_for_language}, **changes)
    trainer.train()
    assert list(trainer.sparse) == ["model.embed_tokens.weight"]


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_withheld_logs_hold_nothing_that_is_not_released(tmp_path: Path) -> None:
    trainer = sparse(tmp_path, privacy={"withhold_non_private_logs": True}, logging_steps=1)
    trainer.train()
    names = {name for entry in trainer.state.log_history for name in entry}
    assert "sparse_embeddings/surviving_rows" in names
    assert "sparse_embeddings/false_positives" not in names


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_promise_of_a_run_without_noise_on_rows_is_infinite(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="not private"):
        promise = PrivacyConfig(noise_multiplier=0, seed=1, sparse_embeddings=SparseEmbeddingConfig(threshold=2.0))
    trainer = make(tmp_path, privacy=promise, parts={"data_collator": pad})
    trainer.train()
    assert trainer.privacy_report().epsilon == float("inf")
    assert trainer._plan.sampler.dataset_size == ROWS


@pytest.mark.slow
def test_an_optimizer_that_was_made_without_looking_for_tables_is_refused_before_a_step(tmp_path: Path) -> None:
    class Own(DPTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trainer = sparse(tmp_path, kind=Own)
    with pytest.raises(ConfigurationError, match="without looking for their tables"):
        trainer.train()
    assert trainer.ledger.charges == 0
