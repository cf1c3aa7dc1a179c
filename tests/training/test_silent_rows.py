"""Rows that add nothing (no label) hide nothing from the check before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dp import DPTrainer
from hf_dp.errors import PreflightError
from tests.training.workbench import make, pad, rows


def silent(widths: set[int]) -> list[dict[str, Any]]:
    """Rows of which those of some widths have no label."""
    return [{**row, "labels": -100} if len(row["input_ids"]) in widths else row for row in rows(60)]


def unmasked(some: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad(some)
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


WIDTHS = sorted({len(row["input_ids"]) for row in rows(60)})


@pytest.mark.parametrize(
    "widths",
    [
        WIDTHS[:1],
        WIDTHS[:2],
        WIDTHS[-1:],
        WIDTHS[:1] + WIDTHS[-1:],
        WIDTHS[1:-1],
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_padding_that_leaks_is_seen(tmp_path: Path, widths: list[int]) -> None:
    trainer: DPTrainer = make(
        tmp_path, parts={"train_dataset": silent(set(widths)), "data_collator": unmasked}, max_steps=1
    )
    with pytest.raises(PreflightError, match="longer or shorter examples"):
        trainer.train()
    assert not trainer.ledger.entries


@pytest.mark.parametrize("said", [float("nan"), 0.7])
@pytest.mark.slow
def test_it_is_seen_where_rows_without_a_gradient_have_a_loss(tmp_path: Path, said: float) -> None:
    class Saying(DPTrainer):
        def compute_per_example_loss(self, model: Any, inputs: Any) -> Tensor:
            losses = super().compute_per_example_loss(model, inputs)
            return losses.where(inputs["labels"].ne(-100), said)

    data = silent({*WIDTHS[:1], *WIDTHS[-1:]})
    trainer = make(tmp_path, kind=Saying, parts={"train_dataset": data, "data_collator": unmasked}, max_steps=1)
    with pytest.raises(PreflightError, match="longer or shorter examples"):
        trainer.train()


@pytest.mark.parametrize("widths", [WIDTHS[:1], WIDTHS[1:-1]], ids=str)
@pytest.mark.slow
def test_one_that_does_not_is_none(tmp_path: Path, widths: list[int]) -> None:
    trainer: DPTrainer = make(tmp_path, parts={"train_dataset": silent(set(widths))}, max_steps=1)
    trainer.train()
    assert trainer.ledger.steps == 1
