"""The ledger that a training goes on with has all that was released, and one report is true of all of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dp import OutputBiasConfig
from hf_dp.errors import LedgerError
from tests.parts.test_output_bias import called_output
from tests.training.own_loops import begun, loop
from tests.training.resuming.resumed import trainer
from tests.training.workbench import STEPS, classifier, make, private, trained

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"seed": 7}, {"seed": None}, "with a seed that is known, or none"),
        ({"seed": None}, {"seed": 7}, "with a seed that is known, or none"),
        ({}, {"noise": "grid"}, "with another noise"),
        ({"noise": "grid"}, {"noise": "chacha20"}, "with another noise"),
        ({"noise_multiplier": 1.0}, {"noise_multiplier": 2.0}, "with another noise multiplier"),
        ({}, {"withhold_non_private_logs": True}, "withhold_non_private_logs=True after 4 private steps"),
    ],
)
@pytest.mark.slow
def test_failure_58_the_promise_is_not_exchanged_between_two_trainings(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], words: str
) -> None:
    if "noise" in now:
        pytest.importorskip("randomgen")
    run = trained(tmp_path, privacy=private(**before))
    run.privacy = private(**{**before, **now})
    with pytest.raises(LedgerError, match=words):
        run.train()
    run.privacy = private(**before)
    run.train()
    assert run.ledger.steps == 2 * STEPS


@pytest.mark.slow
def test_failure_58_nor_before_the_first_step_where_something_was_released(tmp_path: Path) -> None:
    class Interrupting(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    def budget(seed: int | None) -> Any:
        return private(
            seed=seed, noise_multiplier=None, target_epsilon=3.0, accountant="rdp", output_bias=OutputBiasConfig()
        )

    run = make(tmp_path, called_output(classifier()), budget(7), parts={"callbacks": [Interrupting()]})
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.privacy = budget(None)
    with pytest.raises(LedgerError, match="with a seed that is known, or none"):
        run.train()


@pytest.mark.slow
def test_failure_58_nor_by_way_of_a_checkpoint_of_another_promise(tmp_path: Path) -> None:
    """Which of the two ledgers goes on is told by their numbers of steps."""
    for name, noise in (("one", 10.0), ("two", 0.3)):
        make(
            tmp_path / name, privacy=private(noise_multiplier=noise), save_strategy="steps", save_steps=2, max_steps=4
        ).train()

    class Interrupting(TrainerCallback):
        is_on = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.is_on:
                raise KeyboardInterrupt

    run = make(
        tmp_path / "three", privacy=private(noise_multiplier=10.0), parts={"callbacks": [Interrupting()]}, max_steps=4
    )
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    run.privacy, Interrupting.is_on = private(noise_multiplier=0.3), False
    with pytest.raises(LedgerError, match="noise_multiplier: 10.0 in the ledger, 0.3 now"):
        run.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))


def test_failure_58_nor_in_the_middle_of_a_training(tmp_path: Path) -> None:
    class Exchanging(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.privacy = private()

    run = make(
        tmp_path, privacy=private(withhold_non_private_logs=True), parts={"callbacks": [Exchanging()]}, logging_steps=1
    )
    run.train()
    steps = [entry for entry in run.state.log_history if "learning_rate" in entry]
    assert len(steps) == STEPS
    assert not any(entry.get("loss") or "clipped_fraction" in entry for entry in steps)


@pytest.mark.slow
def test_two_trainings_of_one_seed_do_not_take_each_others_place(tmp_path: Path) -> None:
    first, second = (trained(tmp_path / name, privacy=private(seed=7)) for name in ("one", "two"))
    first.train()
    second.train()
    assert first.ledger.steps == second.ledger.steps == 2 * STEPS


@pytest.mark.slow
def test_what_was_resumed_is_saved_before_its_first_step(tmp_path: Path) -> None:
    class Saving(TrainerCallback):
        at = 5

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == self.at:
                raise KeyboardInterrupt
            if state.global_step == 2 and not self.at:
                run.save_model(str(tmp_path / "saved"))

    run, saving = trainer(tmp_path, save_steps=2), Saving()
    run.add_callback(saving)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    saving.at = 0
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (tmp_path / "saved" / "privacy.json").exists()


def test_failure_58_nor_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    told, *parts = begun(classifier(), steps=2, output_dir=tmp_path)
    loop(told, *parts, save_at=1, until=1)
    told.end()
    with pytest.raises(LedgerError, match="withhold_non_private_logs=True after 1 private steps"):
        begun(classifier(), private(withhold_non_private_logs=True), resume=True, steps=2, output_dir=tmp_path)
    begun(classifier(), resume=True, steps=2, output_dir=tmp_path)[0].end()


def test_failure_59_steps_of_this_process_are_not_dropped_for_those_of_another(tmp_path: Path) -> None:
    """Interrupted, and resumed from the newest checkpoint, which an earlier process has left."""

    class Interrupting(TrainerCallback):
        at = 6

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == self.at:
                raise KeyboardInterrupt

    def made() -> Any:
        return trainer(tmp_path, target_epsilon=3.0, save_steps=2, max_steps=9)

    made().train()
    run, interrupting = made(), Interrupting()
    run.add_callback(interrupting)
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert (run.ledger.steps, run.ledger.own_steps) == (6, 4)
    with pytest.raises(LedgerError, match="made 4 private steps after the first 2, and the checkpoint is of 8 steps"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    # From its own; steps 5 and 6 are made again, and count.
    interrupting.at = 7
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert run.ledger.steps == 9


@pytest.mark.slow
def test_failure_59_nor_for_as_many_of_another_trainer(tmp_path: Path) -> None:
    for name in ("one", "two"):
        trainer(tmp_path / name, save_steps=2).train()

    class Interrupting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    run = trainer(tmp_path / "three", save_steps=2)
    run.add_callback(Interrupting())
    for _ in range(2):  # from where it began, again
        with pytest.raises(KeyboardInterrupt):
            run.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    with pytest.raises(LedgerError, match="made 2 private steps after the first 2, and the checkpoint is of 2 steps"):
        run.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("by_state", [True, False])
@pytest.mark.slow
def test_a_copy_from_the_middle_of_a_training_is_known(tmp_path: Path, step: int, by_state: bool) -> None:
    class Copying(TrainerCallback):
        copied: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == step:
                self.copied = copy.deepcopy(model)

    copying = Copying()
    trained(tmp_path, parts={"callbacks": [copying]})
    model = copying.copied
    if by_state:
        model = classifier()
        model.load_state_dict({name: torch.clone(value) for name, value in copying.copied.state_dict().items()})
    with pytest.raises(LedgerError, match=f"another private training in this process has left, after {step} steps"):
        make(tmp_path, model).train()
