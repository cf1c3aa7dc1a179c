"""Re-Attention in a private training: paid for from one budget, logged, saved, resumed, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import TrainerCallback

from hf_dp import DPTrainer, PrivacyConfig, ReAttentionConfig, accounting, load_re_attention
from hf_dp.accounting import Ledger
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import verify
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.re_attention import FILE, FREQUENCIES, installed, read
from hf_dp.parts.token_frequencies import LABEL
from hf_dp.training.engine import Engine
from tests.training.workbench import (
    EXPECTED,
    ROWS,
    a_tokenizer,
    classifier,
    make,
    pad,
    pad_for_language,
    parameters,
    private,
    rows,
    same,
)
from tests.zoo import VOCABULARY, tiny

pytestmark = pytest.mark.usefixtures("checked_once")


def budgeted(path: Path, attention: ReAttentionConfig | None = None, model: Any = None, **changes: Any) -> DPTrainer:
    privacy = private(noise_multiplier=None, target_epsilon=3.0, re_attention=attention or ReAttentionConfig(), seed=7)
    made: DPTrainer = make(path, model, privacy, **changes)
    return made


def test_the_release_is_paid_for_from_the_same_budget(tmp_path: Path) -> None:
    plain = make(tmp_path / "a", privacy=private(noise_multiplier=None, target_epsilon=3.0))
    plain.train()
    trainer = budgeted(tmp_path / "b")
    trainer.train()
    labels = [label for _, _, label in trainer.ledger.entries]
    assert labels == [LABEL, accounting.TRAINING_STEP]
    assert trainer.ledger.steps == plain.ledger.steps
    report = trainer.privacy_report()
    assert 2.9 < report.epsilon <= 3.0
    assert report.noise_multiplier > plain.privacy_report().noise_multiplier
    # The report alone is enough to compute epsilon again.
    again = Ledger()
    (release,) = report.releases
    again.charge(accounting.step_event(release.noise_multiplier, 1.0), LABEL)
    again.charge(accounting.step_event(report.noise_multiplier, report.sampling_probability), count=report.steps)
    assert again.epsilon(report.delta) == report.epsilon
    assert "token presence    released once" in str(report)
    assert type(report).from_json(report.to_json()) == report
    alone = Ledger()
    alone.charge(*trainer.ledger.entries[0][:1])
    assert alone.epsilon(report.delta) == pytest.approx(0.2 * 3.0, rel=1e-2)


def test_what_it_corrects_is_logged_and_saved_and_comes_back(tmp_path: Path) -> None:
    trainer = budgeted(tmp_path, model=classifier(n_layers=2), save_strategy="steps", save_steps=2, logging_steps=2)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    corrections = [value for name, value in logged[-1].items() if name.startswith("re_attention/")]
    assert len(corrections) == 2  # layers
    assert all(value > 0 for value in corrections)
    assert "all else that is logged" in str(trainer.privacy_report().caveats)
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        config, kept = read(folder / FILE)
        assert config == trainer.privacy.re_attention
        shares = kept[FREQUENCIES]
        assert shares.shape == (VOCABULARY,)
        assert float(shares.min()) >= 1 / ROWS - 1e-6
    batch = {"input_ids": torch.arange(8).view(1, 8), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    model = trainer.model.eval()
    loaded = type(model).from_pretrained(tmp_path)
    load_re_attention(loaded, tmp_path)
    torch.testing.assert_close(loaded.eval()(**batch).logits, model(**batch).logits)
    assert "Loaded without hf_dp it is the plain model" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert verify(tmp_path).consistent


def test_withheld_logs_hold_no_corrections(tmp_path: Path) -> None:
    privacy = private(
        noise_multiplier=None, target_epsilon=3.0, re_attention=ReAttentionConfig(), withhold_non_private_logs=True
    )
    trainer = make(tmp_path, privacy=privacy, logging_steps=1)
    trainer.train()
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("re_attention")]
    assert "all else that is logged" not in str(trainer.privacy_report().caveats)


@pytest.mark.parametrize("error", ["paper", "accumulated"])
def test_resumed_it_releases_nothing_anew(tmp_path: Path, error: Any) -> None:
    attention = ReAttentionConfig(error=error)
    options = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-2}
    whole = budgeted(tmp_path, attention, **options)
    whole.train()
    again = budgeted(tmp_path, attention, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [label for _, _, label in again.ledger.entries].count(LABEL) == 1
    assert again.ledger == whole.ledger
    one, two = installed(whole.model), installed(again.model)
    assert one is not None
    assert two is not None
    for name, value in one.errors.items():
        torch.testing.assert_close(two.errors[name], value)
    (tmp_path / "checkpoint-2" / FILE).unlink()
    with pytest.raises(LedgerError, match=f"{FILE}: named in the record, but not there"):
        budgeted(tmp_path, attention, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


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
    [("sgd", 1e-3, 0, True), ("sgd", 0.5, 0, False), ("sgd", 0.5, 2, False), ("sgd", 1e-3, 2, True),
     ("adamw_torch", 1e-5, 0, True), ("adamw_torch", 1e-1, 0, False)],
)  # fmt: skip
def test_paper_errors_far_above_what_a_step_puts_in_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optim: str, rate: float, warmup: int, warned: bool
) -> None:
    schedule = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": warmup} if warmup else {}
    budgeted(tmp_path, optim=optim, learning_rate=rate, **schedule).train()
    assert caplog.text.count("ReAttentionConfig(error='accumulated')") == warned
    if optim == "sgd" and warned:
        assert "1e+03 times the noise" in caplog.text


def test_paper_errors_that_scale_brings_down_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budgeted(tmp_path, ReAttentionConfig(scale=1e-3), optim="sgd", learning_rate=1e-3).train()
    assert "ReAttentionConfig(error='accumulated')" not in caplog.text


@pytest.mark.parametrize(("error", "limit", "steps"), [("paper", 1e-3, 1), ("accumulated", 1e-12, 2)])
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


@pytest.mark.parametrize(("event", "logging_steps"), [("on_step_begin", 1), ("on_step_begin", 1000), ("on_save", 1)])
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


@pytest.mark.slow
def test_accumulated_errors_grow_with_rate_and_steps(tmp_path: Path) -> None:
    attention = ReAttentionConfig(error="accumulated", token_frequencies="uniform")
    found = {}
    for steps, rate in ((2, 0.1), (4, 0.1), (4, 0.2)):
        trainer = make(tmp_path, privacy=private(re_attention=attention), max_steps=steps, learning_rate=rate)
        trainer.train()
        attention_of = installed(trainer.model)
        assert attention_of is not None
        found[steps, rate] = [float(value) for value in attention_of.errors.values()]
    for (steps, rate), values in found.items():
        assert values == pytest.approx([rate * steps**0.5 / EXPECTED] * len(values), rel=1e-5)


@pytest.mark.slow
def test_a_decoder_whose_noise_is_still_to_come_attends_to_a_longer_text(tmp_path: Path) -> None:
    def answers(examples: Any) -> dict[str, torch.Tensor]:
        return {**pad([{"input_ids": e["input_ids"]} for e in examples]), "labels": torch.full((len(examples), 1), 9)}

    model, attention = tiny("t5", "seq2seq", torch.float32, num_layers=1), ReAttentionConfig(error="accumulated")
    trainer = budgeted(tmp_path, attention, model, parts={"data_collator": answers})
    trainer.train()
    assert trainer.ledger.steps == 4


def test_the_best_model_has_the_noise_of_its_step(tmp_path: Path) -> None:
    attention = ReAttentionConfig(error="accumulated", token_frequencies="uniform")
    accuracies = iter([0.9, 0.5])
    trainer = make(
        tmp_path, privacy=private(re_attention=attention), max_steps=4, learning_rate=0.1, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        parts={"eval_dataset": rows(20, seed=1), "compute_metrics": lambda p: {"accuracy": next(accuracies)}},
    )  # fmt: skip
    trainer.train()
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-2")
    attention_of = installed(trainer.model)
    assert attention_of is not None
    assert [float(value) for value in attention_of.errors.values()] == pytest.approx(
        [0.1 * 2**0.5 / EXPECTED] * len(attention_of.errors), rel=1e-5
    )


def test_noise_adds_up_over_trainings_of_one_model(tmp_path: Path) -> None:
    attention = ReAttentionConfig(error="accumulated", token_frequencies="uniform")
    trainer = make(tmp_path, privacy=private(re_attention=attention), max_steps=2)
    for times in (1, 2):
        trainer.train()
        attention_of = installed(trainer.model)
        assert attention_of is not None
        values = [float(value) for value in attention_of.errors.values()]
        assert values == pytest.approx([0.1 * (2 * times) ** 0.5 / EXPECTED] * len(values), rel=1e-5)


def test_an_optimizer_whose_noise_is_not_known_is_refused(tmp_path: Path) -> None:
    attention = ReAttentionConfig(error="accumulated", token_frequencies="uniform")
    trainer = make(tmp_path, privacy=private(re_attention=attention), optim="adafactor")
    with pytest.raises(ConfigurationError, match="Adafactor"):
        trainer.train()
    assert not trainer.ledger.entries


def counted(model: Any, collate: Any, monkeypatch: Any, path: Path) -> torch.Tensor:
    """In how many of the examples each token is, without noise."""
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(GaussianNoise, "add_", lambda _, tensors, *__, **___: sums.append(next(iter(tensors)).clone()))
    examples = [{**row, "input_ids": [*row["input_ids"], 2]} for row in rows()]
    budgeted(path, model=model, parts={"data_collator": collate, "train_dataset": examples}).train()
    return sums[0]


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
        pytest.param("multi_label", [0.0, 1.0, 1.0], marks=pytest.mark.slow),
        pytest.param("regression", 0.5, marks=pytest.mark.slow),
    ],
)
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


def test_random_masks_are_secret_in_the_release(tmp_path: Path, monkeypatch: Any) -> None:
    """Under a public seed one example more would shift the masks of all others."""
    sums = []
    monkeypatch.setattr(GaussianNoise, "add_", lambda _, tensors, *__, **___: sums.append(next(iter(tensors))))
    for _ in range(2):
        privacy = PrivacyConfig(target_epsilon=3.0, re_attention=ReAttentionConfig())
        trainer = make(tmp_path, tiny("bert", "masked_lm", torch.float32), privacy, parts={"data_collator": masked})
        trainer.args.max_steps = 1
        torch.manual_seed(0)
        trainer.train()
    assert not torch.equal(sums[0], sums[2])


@pytest.mark.checked_anew
def test_a_failed_check_spends_nothing_and_leaves_plain_attention(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = budgeted(tmp_path)
    check = Engine.check
    monkeypatch.setattr(Engine, "check", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not trainer.ledger.entries
    assert installed(trainer.model) is None
    monkeypatch.setattr(Engine, "check", check)
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 1
    assert trainer.privacy_report().epsilon <= 3.0


def test_a_failure_after_the_release_does_not_release_again(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = budgeted(tmp_path)
    step = DPTrainer.training_step
    monkeypatch.setattr(DPTrainer, "training_step", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [label for _, _, label in trainer.ledger.entries] == [LABEL]
    trainer.save_model()
    assert verify(tmp_path).consistent
    monkeypatch.setattr(DPTrainer, "training_step", step)
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 1
    assert trainer.privacy_report().epsilon <= 3.0


@pytest.mark.parametrize(
    "change",
    ["budget", "data", *(pytest.param(rare, marks=pytest.mark.slow) for rare in ("nothing released", "steps"))],
)
def test_a_release_under_another_budget_is_not_taken_over(tmp_path: Path, monkeypatch: Any, change: str) -> None:
    """What it cost is in the ledger, and noise would be calibrated as if it had cost something else."""
    trainer = budgeted(tmp_path)
    step = DPTrainer.training_step
    monkeypatch.setattr(DPTrainer, "training_step", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    monkeypatch.setattr(DPTrainer, "training_step", step)
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


def test_what_was_released_outlives_a_failed_check(tmp_path: Path, monkeypatch: Any) -> None:
    trainer = budgeted(tmp_path)
    for kind, name in ((DPTrainer, "training_step"), (Engine, "check")):
        kept = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        monkeypatch.setattr(kind, name, kept)
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries].count(LABEL) == 1
    assert trainer.privacy_report().epsilon <= 3.0


def test_a_checkpoint_of_another_release_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    budgeted(tmp_path, **options).train()
    other = budgeted(tmp_path, **options)
    step = DPTrainer.training_step
    monkeypatch.setattr(DPTrainer, "training_step", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        other.train()
    monkeypatch.setattr(DPTrainer, "training_step", step)
    other._run.parts["token_frequencies"].shares = torch.full((VOCABULARY,), 0.5)
    with pytest.raises(LedgerError, match="other token frequencies"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_checkpoint_without_the_noise_of_a_parameter_is_refused(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    trainer = budgeted(tmp_path, **options)
    trainer.train()
    of_model = installed(trainer.model)
    assert of_model is not None
    of_model.errors.popitem()
    trainer._run.parts["re_attention"].save(tmp_path / "checkpoint-2")
    with pytest.raises(LedgerError, match=f"{FILE}: SHA-256"):
        budgeted(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_nothing_is_released_where_no_embedding_is_trained(tmp_path: Path) -> None:
    model = get_peft_model(classifier(), LoraConfig(r=2, target_modules=["q_lin", "v_lin"]))
    trainer = budgeted(tmp_path, model=model)
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries] == [accounting.TRAINING_STEP]
    assert trainer.privacy_report().releases == ()


def test_without_it_a_model_that_had_it_trains_plainly(tmp_path: Path) -> None:
    trainer = budgeted(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path))
    model = type(trainer.model).from_pretrained(tmp_path)
    load_re_attention(model, tmp_path)
    assert installed(model) is not None
    make(tmp_path, model, private(other_people=True)).train()
    assert installed(model) is None


def test_it_does_not_go_with_a_given_noise_multiplier_and_a_release(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="target_epsilon"):
        private(re_attention=ReAttentionConfig())


def test_a_model_without_tokens_or_without_the_interface_is_refused_before_a_step(tmp_path: Path) -> None:
    trainer = budgeted(tmp_path, model=tiny("deberta-v2", "sequence", torch.float32))
    with pytest.raises(Exception, match="attention interface"):
        trainer.train()
    assert trainer.ledger.steps == 0


def test_without_noise_it_is_plain_attention(tmp_path: Path) -> None:
    attention = ReAttentionConfig(token_frequencies="uniform")
    results = []
    for chosen in (None, attention):
        with pytest.warns(UserWarning, match="not private"):
            privacy = private(noise_multiplier=0, re_attention=chosen)
        trainer = make(tmp_path, classifier(), privacy, parts={"train_dataset": rows()})
        trainer.train()
        results.append(trainer.model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
