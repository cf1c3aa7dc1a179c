"""An output that starts from released frequencies: what is counted, what it becomes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_dp import OutputBiasConfig, PrivacyConfig, ReAttentionConfig
from hf_dp.accounting import Ledger
from hf_dp.config.asked import LABEL_PRESENCE, TOKEN_PRESENCE, asked
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError
from hf_dp.noise.source import NoiseSource
from hf_dp.parts.output_bias import OutputBias
from hf_dp.training.run import Run
from tests.certified import once
from tests.training.workbench import STEPS, classifier, make, pad, pad_for_language, private, rows
from tests.zoo import tiny

BUDGET: dict[str, Any] = {"noise_multiplier": None, "accountant": "rdp"}


def with_output() -> nn.Module:
    """A classifier that calls its last layer its output."""
    return called_output(classifier())


def called_output(model: nn.Module) -> nn.Module:
    """A classifier, so that it calls its last layer its output."""
    kind = type(model)
    named = type(kind.__name__, (kind,), {"get_output_embeddings": lambda self: self.classifier})
    model.__class__ = named
    return model


def begun(path: Path, epsilon: float, data: Any, model: nn.Module | None = None, **settings: Any) -> Any:
    """A trainer after one step with a rate of 0."""
    privacy = private(**BUDGET, target_epsilon=epsilon, output_bias=OutputBiasConfig(**settings))
    model = with_output() if model is None else model
    trainer = make(path, model, privacy, parts={"train_dataset": data}, max_steps=1, learning_rate=0.0)
    with once():
        trainer.train()
    return trainer


@pytest.mark.slow
def test_the_output_starts_as_the_log_of_how_often_each_label_is_seen(tmp_path: Path) -> None:
    data = [{"input_ids": [3, 4], "labels": label} for label in [0] * 30 + [1] * 12 + [2] * 6]
    bias = begun(tmp_path, 1e4, data).model.classifier.bias
    assert torch.allclose(bias.detach(), torch.tensor([30, 12, 6]).div(48).log(), atol=0.02)


def test_one_unit_adds_no_more_than_the_bound(tmp_path: Path) -> None:
    """A row of eight labels, clipped to norm 1: each counts for 1 / sqrt(8)."""
    words = list(range(3, 11))
    data = [{"input_ids": words[i % 8 :] + words[: i % 8]} for i in range(48)]
    data = [{**row, "labels": row["input_ids"]} for row in data]
    model = tiny("bert", "masked_lm", num_hidden_layers=1)
    privacy = private(**BUDGET, target_epsilon=1e4, output_bias=OutputBiasConfig())
    parts = {"train_dataset": data, "data_collator": pad}
    trainer = make(tmp_path, model, privacy, parts=parts, max_steps=1, learning_rate=0.0)
    with once():
        trainer.train()
    found = trainer._run.parts["output_bias"].shares[3:11]
    assert torch.allclose(found, torch.full((8,), 8**-0.5), atol=0.01)
    assert torch.equal(trainer.model.get_output_embeddings().bias[3:11], found.log())


def test_it_is_a_share_of_the_budget_and_left_out_of_ledgers_that_have_none() -> None:
    (share,), queries = asked(PrivacyConfig(target_epsilon=2, output_bias=OutputBiasConfig(budget_share=0.1)), STEPS)
    assert (share.label, share.budget_share, share.times, queries) == (LABEL_PRESENCE, 0.1, 1, ())
    assert asked(PrivacyConfig(target_epsilon=2), STEPS) == ((), ())


@pytest.mark.parametrize(
    ("model", "collator", "words"),
    [
        (lambda: tiny("gpt2", "causal_lm", n_layer=1), pad_for_language, "an output layer without a trained bias"),
        (classifier, pad, "no output layer"),
        (lambda: _frozen(with_output()), pad, "an output layer without a trained bias"),
    ],
)
@pytest.mark.slow
def test_a_model_without_a_bias_to_start_is_refused_before_anything_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, collator: Any, words: str
) -> None:
    monkeypatch.setattr(Ledger, "charge", lambda *_, **__: pytest.fail("charged"))
    privacy = private(**BUDGET, target_epsilon=3.0, output_bias=OutputBiasConfig())
    with once(), pytest.raises(ConfigurationError, match=words):
        make(tmp_path, model(), privacy, parts={"data_collator": collator}).train()


@pytest.mark.slow
def test_a_training_begun_again_starts_from_the_same_release(tmp_path: Path) -> None:
    """Of a model made anew, after one that was cut off before its first step."""
    privacy = private(**BUDGET, target_epsilon=3.0, output_bias=OutputBiasConfig())
    parts = {"train_dataset": rows(), "data_collator": pad, "model_init": with_output}
    trainer = make(tmp_path, None, privacy, parts=parts, max_steps=1, learning_rate=0.0)
    with once(), mock.patch.object(Run, "step", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        trainer.train()
    before = trainer.model.classifier.bias
    with once():
        trainer.train()
    assert trainer.model.classifier.bias is not before
    assert torch.equal(trainer.model.classifier.bias, before)
    assert trainer.ledger.releases == trainer._run.plan.releases


@pytest.mark.parametrize("cut_off", ["the next part", "the release"])
@pytest.mark.slow
def test_what_was_released_before_a_failed_beginning_is_paid_for_once(tmp_path: Path, cut_off: str) -> None:
    settings = {"output_bias": OutputBiasConfig(), "re_attention": ReAttentionConfig()}
    trainer = make(tmp_path, with_output(), private(**BUDGET, target_epsilon=3.0, **settings), max_steps=1)
    where = (OutputBias, "begin") if cut_off == "the next part" else (NoiseSource, "add_")
    with once(), mock.patch.object(*where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [label for _, _, label in trainer.ledger.entries] == [TOKEN_PRESENCE]
    if cut_off == "the next part":
        with once():
            trainer.train()
        assert trainer.privacy_report().epsilon <= 3.0
    else:
        with once(), pytest.raises(BudgetExceededError, match="token presence was released as often as was planned: 1"):
            trainer.train()
    assert sum(count for _, count, label in trainer.ledger.entries if label == TOKEN_PRESENCE) == 1


def test_labels_that_the_output_does_not_have_are_named_so() -> None:
    run = SimpleNamespace(model=with_output(), plan=mock.Mock(), ledger=Ledger(), loader=None)
    with (
        mock.patch("hf_dp.parts.output_bias.labels", return_value=[torch.tensor([1]), torch.tensor([7])]),
        pytest.raises(ConfigurationError, match="label 7 in the training data, for an output of 3 rows"),
    ):
        OutputBias(OutputBiasConfig()).begin(run, None, None)  # type: ignore[arg-type]
    assert not run.ledger.entries


def _frozen(model: Any) -> nn.Module:
    model.classifier.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("settings", [{"budget_share": 0}, {"budget_share": 1.0}, {"presence_clipping_norm": -1}])
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"OutputBiasConfig got {next(iter(settings))}"):
        OutputBiasConfig(**settings)


def test_settings_that_are_none_and_a_budget_that_is_none() -> None:
    with pytest.raises(ConfigurationError, match="output_bias=3"):
        PrivacyConfig(target_epsilon=1, output_bias=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="output_bias, and noise_multiplier in place of"):
        PrivacyConfig(noise_multiplier=1, output_bias=OutputBiasConfig())


def test_a_checkpoint_without_the_release_or_with_another_one(tmp_path: Path) -> None:
    part, earlier = (OutputBias(OutputBiasConfig()) for _ in range(2))
    with pytest.raises(ConfigurationError, match="no frequencies of labels"):
        part.begin(None, tmp_path, None)  # type: ignore[arg-type]
    part.shares, earlier.shares = torch.full((3,), 0.5), torch.full((3,), 0.25)
    part.save(tmp_path)
    with pytest.raises(LedgerError, match="other frequencies of labels"):
        OutputBias(OutputBiasConfig()).begin(None, tmp_path, earlier)  # type: ignore[arg-type]
    earlier.begin(None, tmp_path, part)  # type: ignore[arg-type]
    assert earlier.shares is not None
    assert torch.equal(earlier.shares, part.shares)
