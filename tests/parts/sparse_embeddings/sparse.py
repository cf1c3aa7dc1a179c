"""Trainings with sparse embeddings, and what is seen of their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hf_dp import DPTrainer, SparseEmbeddingConfig
from tests.training.workbench import make, private

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
