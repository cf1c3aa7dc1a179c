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
from tests.training.resuming import trainer
from tests.training.workbench import STEPS, classifier, make, private, trained

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"seed": 7}, {"seed": None}, "with a seed that is known, or none"),
        ({"seed": None}, {"seed": 7}, "with a seed that is known, or none"),
        ({}, {"noise": "grid"}, "with another noise"),
        ({"noise": "grid"}, {"noise": "chacha20"}, "with another noise"),
        ({}, {"withhold_non_private_logs": True}, "withhold_non_private_logs=True after 4 private steps"),
    ],
)
def test_failure_58_the_promise_is_not_exchanged_between_two_trainings(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], words: str
) -> None:
    run = trained(tmp_path, privacy=private(**before))
    run.privacy = private(**{**before, **now})
    with pytest.raises(LedgerError, match=words):
        run.train()
    run.privacy = private(**before)
    run.train()
    assert run.ledger.steps == 2 * STEPS


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
    # From where it began, and from its own; steps 3 and 4 are made again, and count.
    interrupting.at = 7
    with pytest.raises(KeyboardInterrupt):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    interrupting.at = 0
    assert run.ledger.steps == 9


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("by_state", [True, False])
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
