"""A cap on the tokens of a micro-batch: the same draws, noise, ledger and, up to rounding, weights; in both loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dp import PrivateRun
from hf_dp.errors import ConfigurationError
from tests.training.workbench import (
    EXPECTED,
    MICRO,
    STEPS,
    Rows,
    classifier,
    distance,
    make,
    pad,
    parameters,
    private,
    rows,
    same,
)
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")

CAP = 24
ROUNDING = 1e-5


def trained(path: Path, tokens: int | None, resume: bool = False, **changes: Any) -> Any:
    data = rows(low=2, high=30)
    parts = {"train_dataset": data, "max_tokens_per_micro_batch": tokens}
    trainer = make(path, classifier(), private(), parts=parts, include_num_input_tokens_seen="non_padding", **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.slow
def test_a_cap_changes_memory_and_nothing_that_is_promised(tmp_path: Path) -> None:
    plain, capped = (trained(tmp_path / str(tokens), tokens) for tokens in (None, CAP))
    assert 0 < distance(parameters(plain.model), parameters(capped.model)) < ROUNDING
    assert plain.ledger.to_dict() == capped.ledger.to_dict()
    assert plain.privacy_report() == capped.privacy_report()
    assert plain.state.num_input_tokens_seen == capped.state.num_input_tokens_seen > 0
    # Negative control: one example more or less in one step is not rounding.
    other = make(tmp_path / "other", classifier(), private(), parts={"train_dataset": rows(low=2, high=30, seed=1)})
    other.train()
    assert distance(parameters(plain.model), parameters(other.model)) > 10 * ROUNDING


def test_no_micro_batch_is_above_the_cap_but_those_of_one_row(tmp_path: Path) -> None:
    parts = {"train_dataset": rows(low=2, high=30), "max_tokens_per_micro_batch": CAP}
    trainer = make(tmp_path, parts=parts)
    shapes = [
        tuple(micro["input_ids"].shape) for item in trainer.get_train_dataloader() for micro in item["micro_batches"]
    ]
    assert all(count == 1 or count * width <= CAP for count, width in shapes)
    assert {count for count, _ in shapes} == {1, 2, 3, MICRO}


@pytest.mark.slow
def test_a_training_goes_on_under_another_cap(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", None)
    trained(tmp_path / "parts", None, max_steps=STEPS, save_strategy="steps", save_steps=2)
    resumed = trained(tmp_path / "parts", CAP, True, max_steps=STEPS, save_strategy="steps", save_steps=2)
    assert distance(parameters(whole.model), parameters(resumed.model)) < ROUNDING
    assert whole.ledger.to_dict() == resumed.ledger.to_dict()


@pytest.mark.slow
def test_a_loop_of_ones_own_cuts_alike(tmp_path: Path) -> None:
    trainer, model = trained(tmp_path, CAP), classifier()
    run = PrivateRun(
        model, rows(low=2, high=30), private(), pad, expected_batch_size=EXPECTED, micro_batch_size=MICRO, steps=STEPS,
        max_tokens_per_micro_batch=CAP,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert same(parameters(model), parameters(trainer.model))


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_tokens_per_micro_batch=0"):
        make(tmp_path, parts={"max_tokens_per_micro_batch": 0})
    draw = torch.Generator().manual_seed(0)
    images = [{"pixel_values": torch.randn(3, 12, 12, generator=draw), "labels": i % 3} for i in range(48)]

    def stack(examples: Rows) -> dict[str, torch.Tensor]:
        return {key: torch.stack([torch.as_tensor(e[key]) for e in examples]) for key in examples[0]}

    parts = {"train_dataset": images, "data_collator": stack, "max_tokens_per_micro_batch": CAP}
    trainer = make(tmp_path, tiny("vit", "image", torch.float32, num_hidden_layers=1), parts=parts)
    with pytest.raises(ConfigurationError, match="no tensor of shape"):
        trainer.train()
    assert trainer.ledger.steps == 0
