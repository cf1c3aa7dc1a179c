"""A training that is killed and resumed: the ledger goes on, and the noise is fresh."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_dp.errors import BudgetExceededError, LedgerError
from tests.crashes import in_a_fork
from tests.training.resuming.resumed import KILLED, SAVED, STEPS, copied, saved_ledger, trainer
from tests.training.workbench import classifier, make, parameters, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")


class Kill(TrainerCallback):
    """Kills this process."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def dies(path: Path | str, seed: int | None, target: float | None) -> None:
    run = trainer(path, seed=seed, target_epsilon=target)
    run.add_callback(Kill())
    run.train()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Under a budget, with secret randomness; what it calibrates and checks is known in the forks that come later."""
    run = trainer(tmp_path_factory.mktemp("whole"), target_epsilon=3.0)
    run.train()
    return run


@pytest.fixture(scope="module")
def killed_run(whole_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the whole one until it is killed."""
    path = tmp_path_factory.mktemp("secret") / "out"
    assert in_a_fork(lambda: dies(path, None, 3.0)) == signal.SIGKILL
    assert [p.name for p in path.glob("checkpoint-*")] == [f"checkpoint-{SAVED}"]
    return path


@pytest.fixture(scope="module")
def killed_seeded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeded") / "out"
    assert in_a_fork(lambda: dies(path, 7, None)) == signal.SIGKILL
    assert [p.name for p in path.glob("checkpoint-*")] == [f"checkpoint-{SAVED}"]
    return path


def test_failure_21_resuming_after_a_kill_goes_on_with_the_ledger_and_fresh_noise(
    killed_run: Path, whole_run: Any, tmp_path: Path
) -> None:
    results: list[dict[str, Tensor]] = []
    for number in range(2):
        run = trainer(copied(killed_run, tmp_path / str(number)), target_epsilon=3.0)
        out = run.train(resume_from_checkpoint=True)
        assert run.ledger.steps == out.global_step == STEPS
        results.append(parameters(run.model))
        resumed = run.privacy_report()
    assert resumed == whole_run.privacy_report()
    assert 2.9 < resumed.epsilon <= 3.0
    assert not same(*results), "the same checkpoint was continued twice with the same noise"


def test_failure_21_with_a_seed_the_resumed_run_is_the_uninterrupted_one(
    killed_seeded_run: Path, tmp_path: Path
) -> None:
    run = trainer(copied(killed_seeded_run, tmp_path), seed=7)
    run.train(resume_from_checkpoint=True)
    whole = trainer(tmp_path / "whole", seed=7)
    whole.train()
    assert same(parameters(run.model), parameters(whole.model)), "bit for bit"
    assert run.privacy_report() == whole.privacy_report()


@pytest.mark.parametrize("changes", [{"restore_callback_states_from_checkpoint": True}, {"ignore_data_skip": True}])
@pytest.mark.slow
def test_options_of_resuming_keep_the_ledger_working(
    checkpointed: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = copied(checkpointed, tmp_path)
    run = trainer(path, seed=7, **changes)
    run.train(resume_from_checkpoint=True)
    assert run.ledger.steps == STEPS
    state = json.loads((path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert saved_ledger(state)["ledger"] == run.ledger.to_dict()


@pytest.mark.slow
def test_resuming_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    def changes() -> dict[str, Any]:
        return {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch", "seed": 7}

    whole = trainer(tmp_path, **changes())
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-12")
    run = trainer(tmp_path, **changes())
    run.train(resume_from_checkpoint=True)
    assert same(parameters(run.model), parameters(whole.model))


@pytest.mark.slow
def test_a_checkpoint_of_another_directory_is_continued_in_a_new_one(checkpointed: Path, tmp_path: Path) -> None:
    path = copied(checkpointed, tmp_path)
    run = trainer(tmp_path / "elsewhere", seed=7)
    run.train(resume_from_checkpoint=str(path / f"checkpoint-{SAVED}"))
    assert run.ledger.steps == STEPS
    with pytest.raises(LedgerError, match="not the data"):
        trainer(tmp_path / "third", rows(seed=1), seed=7).train(str(path / f"checkpoint-{SAVED}"))


@pytest.mark.slow
def test_a_ledger_with_more_than_the_global_step_is_continued_as_it_is(tmp_path: Path) -> None:
    """As after a second training in one process, or a checkpoint between the charge and the optimizer's step."""
    run = trainer(tmp_path, seed=7)

    class SpendOutside(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                run.ledger.charge(run.ledger.entries[0][0], count=2)

    run.add_callback(SpendOutside())
    run.train()
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    again = trainer(tmp_path, seed=7)
    again.train(resume_from_checkpoint=True)
    assert (again.state.global_step, again.ledger.steps) == (STEPS, STEPS + 2)


@pytest.mark.slow
def test_resuming_a_second_training(tmp_path: Path) -> None:
    run = trainer(tmp_path, seed=7)
    run.train()
    run.args.max_steps = SAVED + 1
    run.train()
    assert run.ledger.steps == STEPS + SAVED + 1
    shutil.rmtree(tmp_path / f"checkpoint-{SAVED + 1}")
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    again = trainer(tmp_path, seed=7, max_steps=SAVED + 1)
    again.train(resume_from_checkpoint=True)
    assert again.ledger.steps == STEPS + SAVED + 1


@pytest.mark.slow
def test_going_back_in_one_process_does_not_forget_what_was_spent(tmp_path: Path) -> None:
    run = trainer(tmp_path, target_epsilon=3.0)
    run.train()
    spent = run.privacy_report().epsilon
    with pytest.raises(BudgetExceededError, match="as many as were planned"):
        run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert run.privacy_report().epsilon == spent


@pytest.mark.parametrize(("target", "steps"), [(3.0, STEPS), (None, 4), (None, 6)])
@pytest.mark.slow
def test_resumed_from_the_last_step_nothing_more_is_spent(tmp_path: Path, target: float | None, steps: int) -> None:
    """Also at the end of an epoch, which has 6 steps; the process died before it could save the model."""
    first = trainer(tmp_path, target_epsilon=target, max_steps=steps, save_steps=steps)
    first.train()
    again = trainer(tmp_path, target_epsilon=target, max_steps=steps, save_steps=steps)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.ledger.steps == steps
    assert again.privacy_report() == first.privacy_report()
    assert same(parameters(again.model), parameters(first.model))
    again.save_model()
    assert (tmp_path / "privacy.json").exists()


@pytest.mark.slow
def test_a_model_made_anew_with_other_frozen_weights_is_resumed(tmp_path: Path) -> None:
    def made(mean: float) -> Any:
        model = classifier()
        torch.nn.init.normal_(model.get_input_embeddings().weight, mean)
        model.get_input_embeddings().requires_grad_(False)
        return model

    make(tmp_path, made(0.0), max_steps=2, save_strategy="steps", save_steps=1).train()
    resumed = make(tmp_path, made(1.0), max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.ledger.steps == 2


@pytest.mark.slow
def test_the_rate_goes_on_as_it_was_and_another_schedule_is_taken(tmp_path: Path) -> None:
    """As with Trainer; the page on resuming says so."""
    saved = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "max_steps": 4}
    make(tmp_path, learning_rate=0.1, lr_scheduler_type="linear", **saved).train()

    def rates(**changes: Any) -> list[float]:
        run = make(tmp_path, **{**saved, **changes})
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        return [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]

    assert rates(learning_rate=7.0, lr_scheduler_type="linear") == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert rates(learning_rate=7.0, lr_scheduler_type="constant") == pytest.approx([0.1, 0.075, 0.05, 0.1])
