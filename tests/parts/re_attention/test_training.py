"""Re-Attention in a private training: paid for from one budget, logged, saved, resumed, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_dp import ReAttentionConfig, accounting, load_re_attention
from hf_dp.accounting import Ledger
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import verify
from hf_dp.parts.re_attention import FILE, FREQUENCIES, installed, read
from hf_dp.parts.token_frequencies import LABEL
from tests.architectures import VOCABULARY
from tests.parts.re_attention.budget import budgeted
from tests.training.workbench import EXPECTED, ROWS, STEPS, classifier, make, pad, private, rows, with_lora
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_withheld_logs_hold_no_corrections(tmp_path: Path) -> None:
    privacy = private(
        noise_multiplier=None, target_epsilon=3.0, re_attention=ReAttentionConfig(), withhold_non_private_logs=True
    )
    trainer = make(tmp_path, privacy=privacy, logging_steps=1)
    trainer.train()
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("re_attention")]
    assert "all else that is logged" not in str(trainer.privacy_report().caveats)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["paper", pytest.param("accumulated", marks=pytest.mark.slow)])
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
    with pytest.raises(LedgerError, match=f"it has no {FILE}, which"):
        budgeted(tmp_path, attention, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


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


@pytest.mark.slow
def test_the_best_model_has_the_noise_of_its_step(tmp_path: Path) -> None:
    attention = ReAttentionConfig(error="accumulated", token_frequencies="uniform")
    accuracies = iter([0.1, 0.9, 0.5])  # the first of what is tried before the first step
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_nothing_is_released_where_no_embedding_is_trained(tmp_path: Path) -> None:
    model = get_peft_model(classifier(), LoraConfig(r=2, target_modules=["q_lin", "v_lin"]))
    trainer = budgeted(tmp_path, model=model)
    trainer.train()
    assert [label for _, _, label in trainer.ledger.entries] == [accounting.TRAINING_STEP]
    assert trainer.privacy_report().releases == ()


def test_adapters_are_not_saved_merged_as_what_the_correction_can_be_put_back_on(tmp_path: Path) -> None:
    """The card says that it can: its noise is that of the adapters' own matrices."""
    attention = ReAttentionConfig(token_frequencies="uniform", error="accumulated")
    trainer = budgeted(tmp_path, attention, with_lora(), save_strategy="steps", save_steps=STEPS)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    whole = trainer.model
    trainer.model = whole.merge_and_unload()
    for folder in ("merged", "adapter"):
        with pytest.raises(ConfigurationError, match="merged into") as refused:
            trainer.save_model(str(tmp_path / folder))
        assert "before merge_and_unload()" in str(refused.value)
    assert not (tmp_path / "merged" / "privacy.json").exists()
    assert verify(tmp_path / "adapter").consistent
    assert verify(tmp_path / f"checkpoint-{STEPS}").consistent


@pytest.mark.slow
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
    trainer = budgeted(tmp_path, model=tiny("deberta-v2", "sequence", torch.float32, num_hidden_layers=1))
    with pytest.raises(Exception, match="attention interface"):
        trainer.train()
    assert trainer.ledger.steps == 0


@pytest.mark.slow
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
