"""Micro-batches of one width in a training: the same promise and, up to rounding, weights; and who is told of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dp.accounting import MANY_ALIKE
from hf_dp.config.asked import promised
from hf_dp.errors import ConfigurationError, LedgerError
from tests.training.workbench import Rows, classifier, distance, make, pad_for_language, parameters, private, rows
from tests.zoo import tiny

SAID = "examples are padded unlike"


def of_one_length() -> Rows:
    return rows(low=6, high=6)


def begun(path: Path, caplog: Any, data: Rows, dtype: torch.dtype = torch.float32, **changes: Any) -> bool:
    """Whether a warning was given of a training of one step, of a language model."""
    privacy = private(equal_widths=changes.pop("equal_widths", False))
    model = tiny("llama", "causal_lm", dtype, num_hidden_layers=1)
    parts = {"train_dataset": data, "data_collator": pad_for_language}
    with caplog.at_level(logging.WARNING):
        make(path, model, privacy, parts=parts, max_steps=1, **changes).train()
    return SAID in caplog.text


@pytest.mark.parametrize(
    "how",
    [{"dtype": torch.bfloat16}, {"bf16": True}],
    ids=["weights", "autocast"],
)
@pytest.mark.slow
def test_16_bits_are_warned_of_where_widths_differ(tmp_path: Path, caplog: Any, how: dict[str, Any]) -> None:
    """Also where none of the few that are tried moves, which says nothing of others."""
    assert begun(tmp_path / "a", caplog, rows(), **how)
    assert caplog.text.count(SAID) == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make(tmp_path / "b", classifier(how.get("dtype", torch.float32)), max_steps=1, bf16="bf16" in how).train()
    assert caplog.text.count(SAID) == 1


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"dtype": torch.bfloat16}, id="weights"),
        pytest.param({"bf16": True}, id="autocast"),
    ],
)
@pytest.mark.slow
def test_nothing_is_said_where_nothing_is_to_be_done(tmp_path: Path, caplog: Any, how: dict[str, Any]) -> None:
    assert not begun(tmp_path / "equal", caplog, rows(), equal_widths=True, **how)
    assert not begun(tmp_path / "one length", caplog, of_one_length(), **how)
    assert not begun(tmp_path / "float32", caplog, rows())
    alone = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    assert not begun(tmp_path / "alone", caplog, rows(), **alone, **how)


def trained(path: Path, *, equal_widths: bool, resume: bool = False, **changes: Any) -> Any:
    trainer = make(path, classifier(), private(equal_widths=equal_widths), **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.slow
def test_the_same_examples_noise_and_cost(tmp_path: Path) -> None:
    usual, equal = (trained(tmp_path / str(name), equal_widths=name) for name in (False, True))
    assert 0 < distance(parameters(usual.model), parameters(equal.model)) < 1e-5
    assert usual.privacy_report().epsilon == equal.privacy_report().epsilon
    assert (MANY_ALIKE in usual.privacy_report().caveats, MANY_ALIKE in equal.privacy_report().caveats) == (True, False)
    widths = [
        {tuple(row.tolist()) for row in micro["attention_mask"]}
        for item in equal.get_train_dataloader()
        for micro in item["micro_batches"]
    ]
    assert all(len(masks) == 1 and 0 not in next(iter(masks)) for masks in widths)


@pytest.mark.slow
def test_what_the_card_says_is_of_all_steps(tmp_path: Path) -> None:
    trained(tmp_path, equal_widths=False, max_steps=1, save_strategy="steps", save_steps=1)
    with pytest.raises(LedgerError, match="equal_widths"):
        trained(tmp_path, equal_widths=True, resume=True, max_steps=2)


@pytest.mark.slow
def test_another_training_of_the_same_trainer_is_held_to_it(tmp_path: Path) -> None:
    trainer = trained(tmp_path, equal_widths=False, max_steps=1)
    trainer.privacy = private(equal_widths=True)
    with pytest.raises(LedgerError, match="another equal_widths"):
        trainer.train()


@pytest.mark.parametrize("odd", [1, "yes", None])
def test_neither_true_nor_false_is_refused(odd: Any) -> None:
    with pytest.raises(ConfigurationError, match="equal_widths="):
        private(equal_widths=odd)


def test_ledgers_of_before_it_could_be_chosen_go_on() -> None:
    assert "equal_widths" not in promised(private())
    assert promised(private(equal_widths=True))["equal_widths"] is True
