"""Ranks that differ are found before the first step; ranks that drift, at the next; secrets stay in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dp.agreement import warn_of_drift
from tests.distributed.differing import (
    draws_of_all,
    drifted,
    faster_alone,
    generators_in_checkpoint,
    refused_by,
    refused_of_first_rows,
    secrets_in_files,
    stopped_alone,
    told,
    told_of_earlier,
    told_of_the_missing,
)
from tests.distributed.gang import Gang

DIFFERENCES = {
    "fewer rows": "the length of train_dataset",
    "another row": "the content of train_dataset",
    "another learning rate": "TrainingArguments.learning_rate",
    "another seed": "TrainingArguments.seed",
    "another length": "TrainingArguments.max_steps",
    "another accumulation": "the expected batch size",
    "another schedule": "TrainingArguments.lr_scheduler_kwargs",
    "another precision": "accelerate's settings",
    "another clipping norm": "PrivacyConfig",
    "another seed of the draws": "PrivacyConfig",
    "another version": "the versions of the libraries",
    "another precision of torch": "torch's settings",
    "another optimizer": "the optimizer",
    "another state of the optimizer": "the optimizer's state",
    "another frozen layer": "the model's parameters",
    "another activation": "the model's modules",
    "another number of heads": "the model's configuration",
}


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.slow
def test_a_rank_that_differs(tmp_path: Path, pair: Gang, what: str) -> None:
    for found in pair.run(refused_by, str(tmp_path), what):
        assert "ConfigurationError: rank 1 has not the same as rank 0" in found
        assert DIFFERENCES[what] in found


@pytest.mark.slow
def test_other_weights_are_replaced_under_ddp_and_refused_under_fsdp(tmp_path: Path, pair: Gang) -> None:
    assert pair.run(refused_by, str(tmp_path), "other weights") == ["no error"] * 2
    for found in pair.run(refused_by, str(tmp_path), "other weights", True):
        assert "the model's weights" in found


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.slow
def test_a_rank_with_another_collator(tmp_path: Path, pair: Gang, shards: bool) -> None:
    for found in pair.run(refused_by, str(tmp_path), "another collator", shards):
        assert "rank 1 has not the same losses as rank 0, of the same rows of train_dataset" in found


@pytest.mark.parametrize(
    ("what", "said"), [("losses", "Scaled.scale keeps something"), ("collator", "Numbering makes")]
)
@pytest.mark.slow
def test_what_is_kept_of_first_rows_is_seen_as_on_one_rank(tmp_path: Path, pair: Gang, what: str, said: str) -> None:
    for found in [
        refused_of_first_rows(str(tmp_path / "one"), what),
        *pair.run(refused_of_first_rows, str(tmp_path), what),
        *pair.run(refused_of_first_rows, str(tmp_path / "shards"), what, True),
    ]:
        assert said in found


@pytest.mark.slow
def test_other_buffers_are_replaced_under_ddp_and_refused_under_fsdp(tmp_path: Path, pair: Gang) -> None:
    assert pair.run(refused_by, str(tmp_path), "another buffer") == ["no error"] * 2
    for found in pair.run(refused_by, str(tmp_path), "another buffer", True):
        assert "the model's buffers" in found


def test_shards_that_are_laid_out_in_another_way(tmp_path: Path, pair: Gang) -> None:
    for found in pair.run(refused_by, str(tmp_path), "other shards", True):
        assert "accelerate's settings" in found


def test_nothing_is_refused_where_nothing_differs(tmp_path: Path, pair: Gang) -> None:
    assert pair.run(refused_by, str(tmp_path), "nothing") == ["no error"] * 2


def test_all_ranks_make_one_draw_and_each_its_own_noise(pair: Gang) -> None:
    first, second = pair.run(draws_of_all)
    assert first["draws"] == second["draws"]
    assert first["key"] == second["key"]
    assert first["noise"] != second["noise"]
    assert pair.run(draws_of_all)[0]["draws"] != first["draws"]


def test_ranks_at_different_steps(pair: Gang) -> None:
    for found in pair.run(drifted):
        assert "the ranks are at different steps: [0, 1]" in found


@pytest.mark.parametrize("shards", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_stops_alone_is_named_on_all(tmp_path: Path, pair: Gang, shards: bool) -> None:
    first, second = pair.run(stopped_alone, str(tmp_path), shards)
    for found in (first, second):
        assert "rank 0 stops after step 2, rank 1 goes on after step 2" in found["error"]
        assert found["steps"] == 2
    # That the promise was none.
    assert first["said"] == ["noise_multiplier=0: this run adds no noise and is not private; its epsilon is infinite."]
    assert second["said"] == []


def test_a_rank_with_another_learning_rate_is_named_on_all(tmp_path: Path, pair: Gang) -> None:
    for found, steps in pair.run(faster_alone, str(tmp_path)):
        assert "(added up over their groups): rank 0 by 0.75, rank 1 by 0.5." in found
        assert steps == 3


@pytest.mark.slow
def test_who_waits_for_a_rank_learns_why_it_is_gone(pair: Gang) -> None:
    for when in ("fails", "fails before"):
        first, second = pair.run(told, when)
        assert "RanksError: rank 1 stopped: OSError: a row that cannot be read" in first
        assert second == "OSError: a row that cannot be read"
    assert "rank 1 ended without a word" in pair.run(told, "silent")[0]
    for found in pair.run(told, "both wait"):
        assert "what the ranks send each other did not arrive: [/gloo" in found


def test_all_learn_of_an_earlier_training_that_is_not_there(tmp_path: Path, pair: Gang) -> None:
    first, second = pair.run(told_of_earlier, str(tmp_path))
    assert first.startswith("HubError: ")
    assert "there is no folder" in first
    assert "RanksError: rank 0 stopped: HubError: " in second


@pytest.mark.slow
def test_no_file_holds_the_secret(tmp_path: Path, pair: Gang) -> None:
    assert pair.run(secrets_in_files, str(tmp_path)) == [[], []]


@pytest.mark.slow
def test_saved_generators_have_seen_no_secret(tmp_path: Path, pair: Gang) -> None:
    """Twice the same, although dropout and draws were not."""
    once, again = (pair.run(generators_in_checkpoint, str(tmp_path / name)) for name in ("one", "two"))
    assert once == again
    assert {"python", "numpy", "cpu"} <= set(once[0])


@pytest.mark.slow
def test_who_waits_in_a_call_says_for_whom(pair: Gang) -> None:
    said = "Rank 0 waits in a_call() for rank 1: every rank must call it, not the first alone."
    assert pair.run(told_of_the_missing, 3.0) == [[said], []]
    assert pair.run(told_of_the_missing, 0.0) == [[], []]


def test_weights_that_drifted_apart_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("hf_dp.agreement.difference", lambda facts: f"rank 1 has other numbers: {next(iter(facts))}")
    warn_of_drift({"weight": "torch.float32 1"})
    assert "what is trained, or the optimizer's state. Each rank adds up gradients at weights of its own" in caplog.text
    caplog.clear()
    monkeypatch.undo()
    warn_of_drift({"weight": "torch.float32 1"})
    assert not caplog.text
