"""Rows of a table that only padding looks up: a gradient there, however small, is a count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp import DPTrainer
from hf_dp.errors import UnsupportedModelError
from hf_dp.parts.sparse_embeddings.contributions import ContributionSum
from tests.parts.sparse_embeddings.sparse import sparse
from tests.training.workbench import Rows, make, pad, private

ADAFEST, FEST = {"threshold": 3.0}, {"method": "fest", "kept_rows": 9}
CHANGES: dict[str, Any] = {"remove_unused_columns": False, "max_steps": 1}


class History(nn.Module):
    """What a user has clicked, weighted by its scores; that of padding is `hidden`."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.score, self.head = nn.Embedding(1500, 4), nn.Linear(4, 1), nn.Linear(4, 3)
        self.hidden = hidden

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        seen = self.items(ids)
        scores = self.score(seen)[..., 0].where(mask.bool(), self.hidden)
        logits: Tensor = self.head((scores.softmax(-1)[..., None] * seen).sum(1))
        return logits


class Clicked(DPTrainer):
    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        logits = model(inputs["input_ids"], inputs["attention_mask"])
        return F.cross_entropy(logits, inputs["labels"], reduction="none")


def histories(long: int) -> Rows:
    """Short ones, and one as long as `long`."""
    rows = [{"input_ids": [3 + i, 4 + i, 5 + i], "labels": i % 3} for i in range(47)]
    return [*rows, {"input_ids": list(range(100, 100 + long)), "labels": 1}]


@pytest.mark.parametrize("method", [ADAFEST, FEST])
def test_failure_103_a_little_gradient_in_the_row_of_padding_counts_as_any(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    """1e-9 of an example's gradient, which no tolerance for gradients sees: all that are padded count once more."""
    trainer = sparse(
        tmp_path, History(-20.0), kind=Clicked, sparse=method, parts={"train_dataset": histories(12)}, **CHANGES
    )
    with pytest.raises(UnsupportedModelError, match=r"in a row of an embedding table when longer"):
        trainer.train()
    assert not trainer.ledger.charges


@pytest.mark.parametrize(("hidden", "long"), [(torch.finfo(torch.float32).min, 12), (-20.0, 3)])
def test_padding_that_is_hidden_wholly_or_never_there_counts_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: float, long: int
) -> None:
    touched, seen = ContributionSum.touched, []

    def noted(self: ContributionSum) -> tuple[Tensor, Tensor]:
        seen.append(touched(self))
        return seen[-1]

    monkeypatch.setattr(ContributionSum, "touched", noted)
    parts = {"train_dataset": histories(long)}
    trainer = sparse(tmp_path, History(hidden), kind=Clicked, sparse=ADAFEST, parts=parts, **CHANGES)
    trainer.train()
    assert trainer.ledger.steps == 1
    assert not any(bool((rows == 0).any()) for rows, _ in seen)


def test_where_all_rows_get_noise_so_little_is_none_that_counts(tmp_path: Path) -> None:
    parts = {"train_dataset": histories(12), "data_collator": pad}
    trainer = make(tmp_path, History(-20.0), private(), kind=Clicked, parts=parts, **CHANGES)
    trainer.train()
    assert trainer.ledger.steps == 1
