"""Corrections follow the noise that a training puts into parameters; those that rounding would spoil are refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Adafactor, TrainerCallback, default_data_collator

from hf_dp import ReAttentionConfig
from hf_dp.errors import ConfigurationError
from hf_dp.hub import verify
from hf_dp.parts.re_attention import installed
from tests.architectures import VOCABULARY
from tests.parts.re_attention.budget import budgeted
from tests.training.own_loops import a_run
from tests.training.workbench import EXPECTED, ROWS, classifier, make, parameters, private, rows, same
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.slow
def test_paper_errors_are_sigma_over_what_touches_a_parameter(tmp_path: Path) -> None:
    attention = ReAttentionConfig(token_frequencies="public", public_frequencies=str(tmp_path / "shares.json"))
    shares = torch.linspace(0, 1, VOCABULARY)
    (tmp_path / "shares.json").write_text(json.dumps(shares.tolist()), encoding="utf-8")
    trainer = make(tmp_path / "out", privacy=private(re_attention=attention, clipping_norm=0.5))
    trainer.train()
    attention_of = installed(trainer.model)
    assert attention_of is not None
    errors = dict(attention_of.errors)
    rows_of = errors.pop("distilbert.embeddings.word_embeddings.weight")
    expected = 0.5 / (EXPECTED * shares).clamp_min(1.0)
    torch.testing.assert_close(rows_of[:, 0], expected)
    assert all(float(value) == pytest.approx(0.5 / EXPECTED) for value in errors.values())
    trainer.save_model()
    assert verify(tmp_path / "out").consistent
    record = (tmp_path / "out" / "privacy.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in record, "whose machine that was"
    (tmp_path / "shares.json").write_text("[0.5]", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="public_frequencies"):
        make(tmp_path, privacy=private(re_attention=attention)).train()


@pytest.mark.parametrize(
    ("optim", "rate", "warmup", "warned"),
    [("sgd", 1e-3, 0, True), ("sgd", 0.5, 0, False), ("sgd", 0.5, 2, False),
     ("sgd", 1e-3, 2, True), ("adamw_torch", 1e-5, 0, True),
     ("adamw_torch", 1e-1, 0, False)],
)  # fmt: skip
@pytest.mark.slow
def test_paper_errors_far_above_what_a_step_puts_in_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optim: str, rate: float, warmup: int, warned: bool
) -> None:
    schedule = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": warmup} if warmup else {}
    budgeted(tmp_path, optim=optim, learning_rate=rate, **schedule).train()
    assert caplog.text.count("ReAttentionConfig(error='accumulated')") == warned
    if optim == "sgd" and warned:
        assert "1e+03 times the noise" in caplog.text


@pytest.mark.slow
def test_paper_errors_that_scale_brings_down_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budgeted(tmp_path, ReAttentionConfig(scale=1e-3), optim="sgd", learning_rate=1e-3).train()
    assert "ReAttentionConfig(error='accumulated')" not in caplog.text


@pytest.mark.slow
def test_an_optimizer_that_is_given_no_rate_is_compared_with_nothing() -> None:
    model = classifier()
    run = a_run(model, private(re_attention=ReAttentionConfig(token_frequencies="uniform")))
    run.begin(optimizer := Adafactor(model.parameters()))
    for item in itertools.islice(run.batches(), 2):
        run.step(item)
        optimizer.step()
    assert run.global_step == 2


@pytest.mark.parametrize(("error", "limit", "steps"), [("paper", 1e-3, 1), ("accumulated", 1e-12, 2)])
@pytest.mark.slow
def test_corrections_that_rounding_would_spoil_are_refused_after_the_step_that_shows_them(
    tmp_path: Path, monkeypatch: Any, error: Any, limit: float, steps: int
) -> None:
    (tmp_path / "rare.json").write_text(json.dumps([0.0] * VOCABULARY), encoding="utf-8")
    attention = ReAttentionConfig(
        token_frequencies="public", public_frequencies=str(tmp_path / "rare.json"), scale=0.05, error=error
    )
    monkeypatch.setattr("hf_dp.parts.re_attention.part._LARGEST", limit)
    trainer = make(tmp_path, privacy=private(re_attention=attention), logging_strategy="no")
    with pytest.raises(ConfigurationError, match=r"a smaller scale.* stays in the ledger"):
        trainer.train()
    assert trainer.ledger.steps == steps


@pytest.mark.parametrize(
    ("event", "logging_steps"),
    [("on_step_begin", 1), ("on_step_begin", 1000), ("on_save", 1)],
)
@pytest.mark.slow
def test_the_guard_on_corrections_sees_each_example_of_each_pass_and_no_log(
    tmp_path: Path, monkeypatch: Any, event: str, logging_steps: int
) -> None:
    """One example at 5e5 among all others at 1; in evaluation, which makes no gradients, it does not matter."""
    due: list[float] = []

    def spoiled(squares: Tensor, noise: Tensor, *args: Any) -> Tensor:
        found = torch.ones(len(squares), noise.shape[1])
        found[0] = due.pop() if due else 1.0
        return found

    class Spoils(TrainerCallback):
        before: Any = None

    def spoil(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and not Spoils.before:
            Spoils.before = parameters(kwargs["model"])
            due.append(5e5)
            if event == "on_save":
                trainer.evaluate(rows(4))

    monkeypatch.setattr("hf_dp.parts.re_attention.attention._corrections", spoiled)
    monkeypatch.setattr(Spoils, event, staticmethod(spoil), raising=False)
    trainer = make(
        tmp_path, privacy=private(re_attention=ReAttentionConfig(token_frequencies="uniform")),
        parts={"callbacks": [Spoils()]}, logging_steps=logging_steps, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    if event == "on_save":
        trainer.train()
        assert not due
        return
    with pytest.raises(ConfigurationError, match=r"of an example by 5e\+05 on average"):
        trainer.train()
    assert trainer.ledger.steps == 3
    assert same(Spoils.before, parameters(trainer.model)), "the weights moved before the refusal"


@pytest.mark.checked_anew
@pytest.mark.slow
def test_corrections_that_are_too_large_in_the_check_before_the_first_step_cost_nothing(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Not even the release of frequencies: rare rows only have more noise than the check has followed."""
    monkeypatch.setattr("hf_dp.parts.re_attention.part._LARGEST", 1e-6)
    trainer = budgeted(tmp_path)
    with pytest.raises(ConfigurationError, match=r"a smaller scale.* Nothing was spent"):
        trainer.train()
    assert not trainer.ledger.entries
    assert installed(trainer.model) is None


@pytest.mark.checked_anew
def test_what_a_check_puts_in_place_of_pictures_is_no_correction_of_theirs(tmp_path: Path) -> None:
    """It puts NaN there; what the model makes of a picture has numbers."""
    pictures = [{"pixel_values": torch.randn(3, 12, 12), "labels": i % 3} for i in range(ROWS)]
    privacy = private(re_attention=ReAttentionConfig(token_frequencies="uniform"))
    parts = {"train_dataset": pictures, "data_collator": default_data_collator}
    trainer = make(tmp_path, tiny("vit", "image", torch.float32), privacy=privacy, parts=parts, max_steps=1)
    trainer.train()
    assert trainer.ledger.steps == 1
