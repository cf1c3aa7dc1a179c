"""In how many examples each token is: counted as the model reads them, released once and never again."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_dp import DPTrainer, PrivacyConfig, ReAttentionConfig
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import verify
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.re_attention import FILE, FREQUENCIES, installed, read
from hf_dp.parts.token_frequencies import LABEL
from hf_dp.training.engine import Engine
from tests.architectures import VOCABULARY
from tests.parts.re_attention.budget import budgeted
from tests.training.workbench import ROWS, a_tokenizer, make, pad, pad_for_language, private, rows
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.slow
def test_frequencies_are_counted_in_public_texts(tmp_path: Path) -> None:
    (tmp_path / "public.txt").write_text("a b\n\na a\nc\n", encoding="utf-8")
    attention = ReAttentionConfig(token_frequencies="public", public_frequencies=str(tmp_path / "public.txt"))
    privacy = private(re_attention=attention)
    trainer = make(tmp_path, privacy=privacy, parts={"processing_class": a_tokenizer({"a", "b", "c"})})
    trainer.train()
    trainer.save_model()
    shares = read(tmp_path / FILE)[1][FREQUENCIES]
    torch.testing.assert_close(shares[:5], torch.tensor([0, 0, 2 / 3, 1 / 3, 1 / 3]))
    assert not shares[5:].any()
    assert LABEL not in [label for _, _, label in trainer.ledger.entries]
    with pytest.raises(ConfigurationError, match="texts, and no tokenizer"):
        make(tmp_path, privacy=privacy).train()
    (tmp_path / "public.txt").write_text("", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="no texts"):
        make(tmp_path, privacy=privacy).train()


def counted(model: Any, collate: Any, monkeypatch: Any, path: Path) -> torch.Tensor:
    """In how many of the examples each token is, without noise."""
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(GaussianNoise, "add_", lambda _, tensors, *__, **___: sums.append(next(iter(tensors)).clone()))
    examples = [{**row, "input_ids": [*row["input_ids"], 2]} for row in rows()]
    budgeted(path, model=model, parts={"data_collator": collate, "train_dataset": examples}).train()
    return sums[0]


@pytest.mark.slow
def test_a_decoder_reads_its_start_token_in_each_example(tmp_path: Path, monkeypatch: Any) -> None:
    def answers(examples: Any) -> dict[str, torch.Tensor]:
        return {
            **pad([{"input_ids": e["input_ids"]} for e in examples]),
            "labels": torch.tensor([[9, 2]] * len(examples)),
        }

    found = counted(tiny("t5", "seq2seq", torch.float32, num_layers=1), answers, monkeypatch, tmp_path)
    assert found[0] == found[9] == found[2] == ROWS


@pytest.mark.parametrize(
    ("head", "label"),
    [
        ("sequence", 1),
        ("multi_label", [0.0, 1.0, 1.0]),
        ("regression", 0.5),
    ],
)
@pytest.mark.slow
def test_what_an_encoder_decoder_tells_classes_apart_by_are_no_tokens(
    tmp_path: Path, monkeypatch: Any, head: str, label: Any
) -> None:
    def classes(examples: Any) -> dict[str, torch.Tensor]:
        return {
            **pad([{"input_ids": e["input_ids"]} for e in examples]),
            "labels": torch.tensor([label] * len(examples)),
        }

    found = counted(tiny("t5", head, torch.float32, num_layers=1), classes, monkeypatch, tmp_path)
    assert found[1] == 0
    assert found[0] == found[2] == ROWS


def masked(examples: Any) -> dict[str, torch.Tensor]:
    """A collator that hides tokens at random."""
    batch = pad_for_language(examples)
    hidden = torch.rand(batch["input_ids"].shape) < 0.5
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 1)}


@pytest.mark.slow
def test_random_masks_are_secret_in_the_release(tmp_path: Path, monkeypatch: Any) -> None:
    """Under a public seed one example more would shift the masks of all others."""
    sums = []
    monkeypatch.setattr(GaussianNoise, "add_", lambda _, tensors, *__, **___: sums.append(next(iter(tensors))))
    for _ in range(2):
        privacy = PrivacyConfig(target_epsilon=3.0, re_attention=ReAttentionConfig())
        model = tiny("bert", "masked_lm", torch.float32, num_hidden_layers=1)
        trainer = make(tmp_path, model, privacy, parts={"data_collator": masked})
        trainer.args.max_steps = 1
        torch.manual_seed(0)
        trainer.train()
    assert not torch.equal(sums[0], sums[2])


def failed_in(kind: type, name: str, trainer: Any) -> Any:
    """`trainer`, once it has tried to train where this method of a class fails."""
    with mock.patch.object(kind, name, side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        trainer.train()
    return trainer


@pytest.mark.checked_anew
@pytest.mark.slow
def test_a_failed_check_spends_nothing_and_leaves_plain_attention(tmp_path: Path) -> None:
    trainer = failed_in(Engine, "check", budgeted(tmp_path))
    assert not trainer.ledger.entries
    assert installed(trainer.model) is None
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 1
    assert trainer.privacy_report().epsilon <= 3.0


@pytest.mark.slow
def test_a_failure_after_the_release_does_not_release_again(tmp_path: Path) -> None:
    trainer = failed_in(DPTrainer, "training_step", budgeted(tmp_path))
    assert [label for _, _, label in trainer.ledger.entries] == [LABEL]
    trainer.save_model()
    assert verify(tmp_path).consistent
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 1
    assert trainer.privacy_report().epsilon <= 3.0


@pytest.mark.parametrize(
    "change",
    ["budget", "data", "nothing released", "steps"],
)
@pytest.mark.slow
def test_a_release_under_another_budget_is_not_taken_over(tmp_path: Path, change: str) -> None:
    """What it cost is in the ledger, and noise would be calibrated as if it had cost something else."""
    trainer = failed_in(DPTrainer, "training_step", budgeted(tmp_path))
    spent = trainer.ledger.entries
    if change == "budget":
        trainer.privacy = trainer.privacy.replace(target_epsilon=0.5)
    elif change == "data":
        trainer.train_dataset = rows(ROWS + 12)
    elif change == "nothing released":
        trainer.privacy = trainer.privacy.replace(re_attention=None)
    else:
        trainer.args.max_steps = 2
        trainer.train()
        assert 2.9 < trainer.privacy_report().epsilon <= 3.0
        return
    with pytest.raises(LedgerError, match="token presence"):
        trainer.train()
    assert trainer.ledger.entries == spent


@pytest.mark.slow
def test_what_was_released_outlives_a_failed_check(tmp_path: Path) -> None:
    trainer = failed_in(Engine, "check", failed_in(DPTrainer, "training_step", budgeted(tmp_path)))
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 1
    assert trainer.privacy_report().epsilon <= 3.0


@pytest.mark.slow
def test_a_checkpoint_of_another_release_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    budgeted(tmp_path, **options).train()
    other = failed_in(DPTrainer, "training_step", budgeted(tmp_path, **options))
    other.ledger.own_labels.clear()  # as if another process had released them
    other._run.parts["token_frequencies"].shares = torch.full((VOCABULARY,), 0.5)
    with pytest.raises(LedgerError, match="other token frequencies"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
