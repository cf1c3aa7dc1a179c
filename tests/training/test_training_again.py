"""Training again, with the same trainer or another one: nothing that was spent is forgotten."""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
)

from hf_dp import OutputBiasConfig, PrivateRun
from hf_dp.accounting import step_event
from hf_dp.accounting.events import MOST_MECHANISMS
from hf_dp.errors import BudgetExceededError, ConfigurationError, LedgerError
from hf_dp.parts.output_bias import OutputBias
from hf_dp.training.run import Run
from tests.parts.test_output_bias import called_output
from tests.training.workbench import (
    STEPS,
    arguments,
    classifier,
    make,
    pad,
    parameters,
    private,
    rows,
    same,
    trained,
)

pytestmark = pytest.mark.usefixtures("checked_once")

# --- training again ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_again_composes_under_given_noise(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    once = trainer.privacy_report().epsilon
    trainer.train()
    assert trainer.ledger.steps == trainer.privacy_report().steps == 2 * STEPS
    twice = trained(tmp_path, max_steps=2 * STEPS).privacy_report().epsilon
    assert trainer.privacy_report().epsilon == pytest.approx(twice)
    assert twice > once


def test_training_again_is_refused_under_a_budget(tmp_path: Path) -> None:
    model = classifier()
    trainer = make(tmp_path, model, private(noise_multiplier=None, target_epsilon=3.0))
    trainer.train()
    before, steps = parameters(model), trainer.ledger.steps
    with pytest.raises(BudgetExceededError, match=r"again after 4 private steps[\s\S]*noise_multiplier"):
        trainer.train()
    assert same(before, parameters(model))
    assert trainer.ledger.steps == steps


def test_a_training_that_was_broken_off_is_told_how_to_go_on(tmp_path: Path) -> None:
    class Interrupted(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise KeyboardInterrupt

    trainer = make(
        tmp_path, privacy=private(noise_multiplier=None, target_epsilon=3.0), parts={"callbacks": [Interrupted()]}
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(
        BudgetExceededError, match=r"again after 1 private steps[\s\S]*resume_from_checkpoint=True"
    ) as no:
        trainer.train()
    assert "Without a checkpoint" in no.value.fix  # of which there is none: save_strategy="no"
    assert "make a new trainer with the model loaded anew" in no.value.fix
    with pytest.raises(LedgerError, match="trained this model before: 1 private steps") as no:
        make(tmp_path / "anew", trainer.model, privacy=private(noise_multiplier=None, target_epsilon=3.0)).train()
    assert "With noise_multiplier a trainer may train() again" in no.value.fix
    assert "save() of a PrivateRun" in no.value.fix


@pytest.mark.slow
def test_training_again_with_more_kinds_of_steps_than_are_verified_is_refused(
    tmp_path: Path,
) -> None:
    trainer = make(tmp_path, privacy=private(accountant="rdp"), max_steps=1)
    kinds = [step_event(1 + i / 10, 0.1) for i in range(1, MOST_MECHANISMS)]
    trainer.train()
    for kind in kinds:
        trainer.ledger.charge(kind)
    trainer.train()  # alike, it is one of them
    trainer.ledger.charge(step_event(9.0, 0.1))
    before = trainer.ledger.charges
    with pytest.raises(ConfigurationError, match="17 different mechanisms, those in the ledger among them"):
        trainer.train()
    assert trainer.ledger.charges == before


def test_training_stops_at_the_budget_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, privacy=private(noise_multiplier=None, target_epsilon=3.0))

    class SpendOutside(TrainerCallback):
        """Something else is charged in the middle, so that the plan can no longer be carried out in full."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.ledger.charge(trainer.ledger.entries[0][0])

    trainer.add_callback(SpendOutside())
    trainer.train()
    assert (trainer.state.global_step, trainer.ledger.steps) == (3, 4)
    assert trainer.privacy_report().epsilon <= 3.0
    assert "budget is spent" in caplog.text


@pytest.mark.slow
def test_what_has_got_another_shape_since_is_saved(tmp_path: Path) -> None:
    run = trained(tmp_path / "private", privacy=private(seed=None), max_steps=1)
    for model in (run.model, copy.deepcopy(run.model)):
        model.resize_token_embeddings(model.config.vocab_size + 1)
        run.model = model
        run.save_model(str(tmp_path / "after"))


def test_failure_52_weights_that_a_training_without_privacy_has_moved_since_are_not_claimed(tmp_path: Path) -> None:
    run = trained(tmp_path / "private", privacy=private(seed=None), max_steps=1)
    run.save_model(str(tmp_path / "before"))
    data = {"train_dataset": rows(), "data_collator": pad}
    Trainer(model=run.model, args=arguments(tmp_path / "plain", max_steps=1), **data).train()
    for again in (lambda: run.save_model(str(tmp_path / "after")), run.train):
        with pytest.raises(LedgerError, match="after something else than this training has changed"):
            again()
    assert not (tmp_path / "after").exists()
    assert run.ledger.steps == 1
    # The end of a training that was refused is none.
    with pytest.raises(LedgerError, match="after something else than this training has changed"):
        run.save_model()


def trained_before(path: Path, model: nn.Module) -> None:
    Trainer(model=model, args=arguments(path, max_steps=1), train_dataset=rows(), data_collator=pad).train()


def loop_before(path: Path, model: nn.Module) -> None:
    model(**pad(rows(4))).loss.backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    model.requires_grad_(False).classifier.requires_grad_(True)


@pytest.mark.parametrize("baseline", [trained_before, loop_before])
@pytest.mark.slow
def test_failure_82_a_baseline_before_on_the_same_model_object_is_warned_of(
    baseline: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words, model = "was trained before in this process, by ", classifier()
    copied = copy.deepcopy(model)
    baseline(tmp_path / "baseline", model)
    for name, one in (("copy", copied), ("again", copied), ("same", model)):
        caplog.clear()
        trainer = make(tmp_path / name, one, private(other_people=name == "again"), max_steps=1)
        trainer.train()
        trainer.train()
        assert (words in caplog.text) == (name == "same"), name


@pytest.mark.parametrize("is_trained", [True, False])
def test_failure_52_a_copy_in_the_place_of_what_was_trained(tmp_path: Path, is_trained: bool) -> None:
    run = trained(tmp_path / "private", privacy=private(seed=None), max_steps=1)
    run.model = copy.deepcopy(run.model)
    if not is_trained:
        run.save_model(str(tmp_path / "after"))
        return
    data = {"train_dataset": rows(), "data_collator": pad}
    Trainer(model=run.model, args=arguments(tmp_path / "plain", max_steps=1), **data).train()
    with pytest.raises(LedgerError, match="after something else than this training has changed"):
        run.save_model(str(tmp_path / "after"))


def test_removing_the_privacy_callback_stops_the_training(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    from hf_dp.training.callbacks import PrivacyCallback

    trainer.remove_callback(PrivacyCallback)
    with pytest.raises(ConfigurationError, match="PrivacyCallback"):
        trainer.train()
    assert trainer.ledger.steps == 0


def test_a_step_outside_train_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    with pytest.raises(ConfigurationError, match="outside train"):
        trainer.training_step(trainer.model, {"micro_batches": [pad(rows(2))]})
    assert trainer.ledger.steps == 0


@pytest.mark.slow
def test_a_training_that_is_refused_changes_nothing_in_the_report_of_the_one_before(tmp_path):
    trainer = make(tmp_path, privacy=private(noise_multiplier=None, target_epsilon=3.0))
    trainer.train()
    report = trainer.privacy_report()
    trainer.train_dataset = rows(12)
    with pytest.raises(BudgetExceededError):
        trainer.train()
    assert trainer.privacy_report() == report


def test_one_ledger_is_not_continued_on_data_of_another_size(tmp_path):
    trainer = make(tmp_path, privacy=private())
    trainer.train()
    trainer.train_dataset = rows(12)
    with pytest.raises(LedgerError, match="train\\(\\) was called again with 12 examples"):
        trainer.train()


# --- another trainer on the same model -------------------------------------------------------------------------------


def test_another_trainers_steps_are_not_left_out_of_the_report(tmp_path: Path) -> None:
    model = classifier()
    first = make(tmp_path, model)
    first.train()
    before = parameters(model)
    second = make(tmp_path, model)
    with pytest.raises(
        LedgerError, match=r"another private training has trained this model before: 4 private steps on 48"
    ):
        second.train()
    del first
    with pytest.raises(LedgerError, match="another private training"):
        second.train()
    assert second.ledger.steps == 0
    assert same(before, parameters(model))


@pytest.mark.slow
def test_frozen_weights_that_were_trained_count_and_an_adapter_beside_them_does_not(tmp_path: Path) -> None:
    model = classifier()
    trained(tmp_path, model=model)
    adapter = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_lin"]))
    with pytest.raises(LedgerError, match="another private training"):
        make(tmp_path, adapter).train()

    base = classifier()
    one = get_peft_model(base, LoraConfig(target_modules=["q_lin"]))
    trained(tmp_path, model=one)
    other = get_peft_model(one.unload(), LoraConfig(target_modules=["q_lin"]))
    assert trained(tmp_path, model=other).ledger.steps == STEPS


@pytest.mark.slow
def test_an_adapter_that_was_merged_into_frozen_weights_counts(tmp_path: Path) -> None:
    base = classifier()
    one = get_peft_model(base, LoraConfig(target_modules=["q_lin"]))
    trained(tmp_path, model=one, max_steps=1)
    merged = one.merge_and_unload()
    assert merged is base
    two = get_peft_model(merged, LoraConfig(target_modules=["q_lin"]))
    with pytest.raises(LedgerError, match="another private training has trained this model before: 1 private steps"):
        make(tmp_path, two, max_steps=1).train()
    make(tmp_path, two, private(other_people=True), max_steps=1).train()


@pytest.mark.slow
def test_a_trainer_that_took_no_step_leaves_the_model_to_another(tmp_path: Path) -> None:
    model = classifier()
    first = make(tmp_path, model)
    first.add_callback(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        first.train()
    assert trained(tmp_path, model=model).ledger.steps == STEPS


@pytest.mark.parametrize("where", [(Run, "step"), (OutputBias, "begin")])
@pytest.mark.slow
def test_what_was_released_before_any_step_is_not_left_out_either(tmp_path: Path, where: tuple[type, str]) -> None:
    """Also where the beginning itself was cut off, with the release in the weights."""
    # Of fewer numbers copies are not known.
    model, kind, hook = called_output(classifier(num_labels=16)), *where
    begin = OutputBias.begin

    def cut_off(self: Any, *given: Any) -> None:
        if kind is OutputBias:
            begin(self, *given)
        raise KeyboardInterrupt

    privacy = private(noise_multiplier=None, target_epsilon=3.0, accountant="rdp", output_bias=OutputBiasConfig())
    first = make(tmp_path, model, privacy)
    with mock.patch.object(kind, hook, cut_off), pytest.raises(KeyboardInterrupt):
        first.train()
    assert (first.ledger.steps, first.ledger.charges) == (0, 1)
    with pytest.raises(LedgerError, match="before: it released label presence, and took no step, on 48 examples"):
        make(tmp_path, model).train()
    with pytest.raises(LedgerError, match="another private training in this process has left, after 0 steps"):
        make(tmp_path, copy.deepcopy(model)).train()
    run = PrivateRun(model, rows(), private(), pad, expected_batch_size=8, micro_batch_size=4, steps=1)
    with pytest.raises(LedgerError, match="it released label presence"):
        run.begin(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_training_that_took_no_step_does_not_hide_the_one_before_it(tmp_path: Path) -> None:
    model = classifier()
    trained(tmp_path, model=model, max_steps=1)
    second = make(tmp_path, model, private(other_people=True), max_steps=1)
    second.add_callback(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        second.train()
    with pytest.raises(LedgerError, match="trained this model before: 1 private steps"):
        make(tmp_path, model).train()


class Interrupting(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_another_trainer_resumes_from_the_first_ones_checkpoint(tmp_path: Path) -> None:
    model = classifier()
    trained(tmp_path, model=model, save_strategy="steps", save_steps=2, max_steps=STEPS)
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    again = make(tmp_path, model)
    again.train(resume_from_checkpoint=True)
    assert again.ledger.steps == STEPS


@pytest.mark.slow
def test_weights_that_an_adapters_checkpoint_does_not_bring_back_are_not_left_out(tmp_path: Path) -> None:
    model = classifier()
    adapter = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["q_lin"]))
    trained(tmp_path / "adapter", model=adapter, save_strategy="steps", save_steps=2)
    shutil.rmtree(tmp_path / "adapter" / f"checkpoint-{STEPS}")

    base = classifier()
    trained(tmp_path / "full", model=base)
    again = make(tmp_path / "adapter", get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["q_lin"])))
    with pytest.raises(LedgerError, match="another private training"):
        again.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_failure_141_after_a_training_a_step_with_rows_of_other_data_is_refused_and_not_charged_as_its_own(
    tmp_path: Path, is_interrupted: bool
) -> None:
    class Interrupting(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if is_interrupted:
                raise KeyboardInterrupt

    trainer = make(tmp_path, privacy=private(noise_multiplier=1.0), parts={"callbacks": [Interrupting()]}, max_steps=1)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
        trainer.train()
    trainer.train_dataset = rows(12)  # of which each is drawn four times as often
    for item in trainer.get_train_dataloader():
        with pytest.raises(ConfigurationError, match="training that has not begun, or has ended"):
            trainer.training_step(trainer.model, item)
    assert trainer.ledger.steps == 1
