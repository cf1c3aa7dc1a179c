"""Checkpoints without a sound ledger, of another run, or of half a run are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dp.data.fingerprint import KEY_FILE
from hf_dp.errors import LedgerError
from tests.training.resuming.resumed import SAVED, STEPS, copied, edit_state, saved_ledger, trainer
from tests.training.workbench import Rows, parameters, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")


def drop_callback(state: dict[str, Any]) -> None:
    del state["stateful_callbacks"]["PrivacyCallback"]


def no_ledger(state: dict[str, Any]) -> None:
    state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved_ledger"] = None


def unknown_event(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"][0]["event"] = {"type": "Laplace"}


def negative_count(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"][0]["count"] = -1


def too_few(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"][0]["count"] = SAVED - 1


def nothing_spent(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"] = []


def other_version(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["version"] = 99


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_callback, "no privacy ledger"),
        (no_ledger, "no privacy ledger"),
        (lambda state: state.pop("stateful_callbacks"), "no privacy ledger"),
        (lambda state: state.pop("global_step"), "no privacy ledger"),
        (unknown_event, "Laplace"),
        (negative_count, "-1"),
        (other_version, "99"),
        (too_few, "counts 3 private steps, its trainer state 4"),
        (nothing_spent, "counts 0 private steps, its trainer state 4"),
    ],
)
def test_failure_21_a_checkpoint_without_a_sound_ledger_is_refused(
    checkpointed: Path, tmp_path: Path, spoil: Callable[[dict[str, Any]], None], words: str
) -> None:
    path = copied(checkpointed, tmp_path)
    edit_state(path, spoil)
    run = trainer(path, seed=7)
    before = parameters(run.model)
    with pytest.raises(LedgerError, match=words) as caught:
        run.train(resume_from_checkpoint=True)
    assert "What to do" in str(caught.value)
    assert run.ledger.steps == 0
    assert same(before, parameters(run.model)), "refused before any weight was read"


def test_half_a_checkpoint_is_refused(checkpointed: Path, tmp_path: Path) -> None:
    path = copied(checkpointed, tmp_path)
    file = path / f"checkpoint-{SAVED}" / "trainer_state.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(LedgerError, match="trainer_state.json"):
        trainer(path, seed=7).train(resume_from_checkpoint=True)
    file.unlink()
    with pytest.raises(LedgerError, match="trainer_state.json"):
        trainer(path, seed=7).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_an_ordinary_trainer_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    run = trainer(tmp_path, seed=7)
    plain = Trainer(model=run.model, args=run.args, train_dataset=rows(), data_collator=run.data_collator)
    plain.train()
    with pytest.raises(LedgerError, match="no privacy ledger"):
        trainer(tmp_path, seed=7).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (rows(seed=1), {}, "not the data"),
        (rows()[::-1], {}, "not the data"),
        (rows(47), {}, "dataset_size: 48 in the ledger, 47 now"),
        (None, {"clipping_norm": 2.0}, "clipping_norm: 1.0 in the ledger, 2.0 now"),
        (None, {"target_epsilon": 3.0}, "target_epsilon: None in the ledger, 3.0 now"),
        (None, {"max_steps": STEPS + 1}, f"planned_steps: {STEPS} in the ledger, {STEPS + 1} now"),
        (None, {"gradient_accumulation_steps": 1}, "(?s)expected_batch_size: 8 .*4 now.*change gradient_acc.*times 2"),
    ],
    ids=["other data", "other order", "other n", "other clipping", "other budget", "other steps", "other batch"],
)
def test_failure_21_a_checkpoint_of_another_run_is_refused(
    checkpointed: Path, tmp_path: Path, data: Rows | None, changes: dict[str, Any], words: str
) -> None:
    run = trainer(copied(checkpointed, tmp_path), data, seed=7, **changes)
    with pytest.raises(LedgerError, match=words):
        run.train(resume_from_checkpoint=True)
    assert run.ledger.steps == 0


def test_failure_53_what_was_logged_is_not_said_to_be_withheld(checkpointed: Path, tmp_path: Path) -> None:
    run = trainer(copied(checkpointed, tmp_path), seed=7, withhold_non_private_logs=True)
    with pytest.raises(LedgerError, match="total_flos of its training, which withhold_non_private_logs=True withholds"):
        run.train(resume_from_checkpoint=True)
    begun = trainer(tmp_path / "begun", seed=7, withhold_non_private_logs=True, logging_steps=1)
    begun.train()
    again = trainer(tmp_path / "begun", seed=7, withhold_non_private_logs=True)
    again.train(resume_from_checkpoint=str(tmp_path / "begun" / f"checkpoint-{SAVED}"))
    assert again.state.global_step == STEPS


@pytest.mark.parametrize("trained", [True, False])
def test_failure_50_weights_of_a_refused_checkpoint_are_not_claimed(
    checkpointed: Path, tmp_path: Path, trained: bool
) -> None:
    """They are in the model by then, and the ledger of this trainer is of its own weights, or there is none."""
    run = trainer(tmp_path / "own", max_steps=1)
    if trained:
        run.train()
    else:
        run.save_model(str(tmp_path / "public"))
        assert not (tmp_path / "public" / "privacy.json").exists()
    with pytest.raises(LedgerError, match="planned_steps"):
        run.train(resume_from_checkpoint=str(copied(checkpointed, tmp_path) / f"checkpoint-{SAVED}"))
    with pytest.raises(LedgerError, match="read from a checkpoint that was refused"):
        run.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_a_seeded_run_cannot_be_continued_as_a_private_one(checkpointed: Path, tmp_path: Path) -> None:
    """Its first steps stay repeatable, so the report must go on saying that it is not private."""
    run = trainer(copied(checkpointed, tmp_path), seed=None)
    with pytest.raises(LedgerError, match="reproducible: True in the ledger, False now"):
        run.train(resume_from_checkpoint=True)


def test_a_lost_key_is_said_aloud(checkpointed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copied(checkpointed, tmp_path)
    (path / KEY_FILE).unlink()
    with caplog.at_level(logging.WARNING):
        trainer(path, seed=7).train(resume_from_checkpoint=True)
    assert "could not be compared" in caplog.text
