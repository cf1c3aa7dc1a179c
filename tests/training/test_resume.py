"""A training that is killed and resumed: the ledger goes on, the noise is fresh, and what does not fit is refused."""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from hf_dp.data.fingerprint import KEY_FILE, compare, fingerprint, fingerprint_key
from hf_dp.errors import BudgetExceededError, LedgerError
from tests.crashes import in_a_fork
from tests.training.workbench import Rows, classifier, make, parameters, private, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")

STEPS, SAVED, KILLED = 7, 4, 6
ROOT = Path(__file__).resolve().parents[2]
# Step 6 is made and charged in the killed process, and lost with it; the last checkpoint is of step 4, in the first
# epoch's middle (an epoch has 6 steps).


class Kill(TrainerCallback):
    """Kills this process."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(path: Path | str, data: Rows | None = None, seed: int | None = None, **changes: Any) -> Any:
    """Dropout and AdamW, so that the generators' and the optimizer's states matter."""
    promise = {"seed": seed, "clipping_norm": changes.pop("clipping_norm", 1.0)}
    target = changes.pop("target_epsilon", None)
    privacy = private(**promise, **({"noise_multiplier": None, "target_epsilon": target} if target else {}))
    values = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "optim": "adamw_torch", **changes}
    parts = {"train_dataset": rows() if data is None else data}
    return make(path, classifier(dropout=0.1), privacy, parts=parts, learning_rate=1e-2, **values)


def dies(path: Path | str, seed: int | None, target: float | None) -> None:
    run = trainer(path, seed=seed, target_epsilon=target)
    run.add_callback(Kill())
    run.train()


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Under a budget, with secret randomness."""
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


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that stopped after its first checkpoint, to be copied and spoilt."""
    path = tmp_path_factory.mktemp("checkpointed") / "out"
    trainer(path, seed=7).train()
    shutil.rmtree(path / f"checkpoint-{STEPS}")
    return path


def copied(path: Path, to: Path) -> Path:
    shutil.copytree(path, to / "out")
    return to / "out"


def edit_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / f"checkpoint-{SAVED}" / "trainer_state.json"
    state = json.loads(file.read_text())
    change(state)
    file.write_text(json.dumps(state))


def saved_ledger(state: dict[str, Any]) -> dict[str, Any]:
    return state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved_ledger"]


# --- going on ---------------------------------------------------------------------------------------------------------


def test_failure_21_resuming_after_a_kill_goes_on_with_the_ledger_and_fresh_noise(
    killed_run: Path, tmp_path: Path
) -> None:
    results: list[dict[str, Tensor]] = []
    for number in range(2):
        run = trainer(copied(killed_run, tmp_path / str(number)), target_epsilon=3.0)
        out = run.train(resume_from_checkpoint=True)
        assert run.ledger.steps == out.global_step == STEPS
        results.append(parameters(run.model))
        resumed = run.privacy_report()
    whole = trainer(tmp_path / "whole", target_epsilon=3.0)
    whole.train()
    assert resumed == whole.privacy_report()
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
def test_options_of_resuming_keep_the_ledger_working(
    checkpointed: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = copied(checkpointed, tmp_path)
    run = trainer(path, seed=7, **changes)
    run.train(resume_from_checkpoint=True)
    assert run.ledger.steps == STEPS
    state = json.loads((path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert saved_ledger(state)["ledger"] == run.ledger.to_dict()


def test_resuming_from_the_end_of_an_epoch(tmp_path: Path) -> None:
    def changes() -> dict[str, Any]:
        return {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch", "seed": 7}

    whole = trainer(tmp_path, **changes())
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-12")
    run = trainer(tmp_path, **changes())
    run.train(resume_from_checkpoint=True)
    assert same(parameters(run.model), parameters(whole.model))


def test_a_checkpoint_of_another_directory_is_continued_in_a_new_one(checkpointed: Path, tmp_path: Path) -> None:
    path = copied(checkpointed, tmp_path)
    run = trainer(tmp_path / "elsewhere", seed=7)
    run.train(resume_from_checkpoint=str(path / f"checkpoint-{SAVED}"))
    assert run.ledger.steps == STEPS
    with pytest.raises(LedgerError, match="not the data"):
        trainer(tmp_path / "third", rows(seed=1), seed=7).train(str(path / f"checkpoint-{SAVED}"))


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


def test_going_back_in_one_process_does_not_forget_what_was_spent(tmp_path: Path) -> None:
    run = trainer(tmp_path, target_epsilon=3.0)
    run.train()
    spent = run.privacy_report().epsilon
    with pytest.raises(BudgetExceededError, match="as many as were planned"):
        run.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}"))
    assert run.privacy_report().epsilon == spent


# --- refusals ---------------------------------------------------------------------------------------------------------


def drop_callback(state: dict[str, Any]) -> None:
    del state["stateful_callbacks"]["PrivacyCallback"]


def no_ledger(state: dict[str, Any]) -> None:
    state["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved_ledger"] = None


def unknown_event(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"][0]["event"] = {"type": "Laplace"}


def negative_count(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"][0]["count"] = -1


def too_few(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"][0]["count"] = SAVED - 1


def nothing_spent(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["entries"] = []


def other_version(state: dict[str, Any]) -> None:
    saved_ledger(state)["ledger"]["version"] = 99


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_callback, "no privacy ledger"),
        (no_ledger, "no privacy ledger"),
        (lambda state: state.pop("stateful_callbacks"), "no privacy ledger"),
        (lambda state: state.pop("global_step"), "no privacy ledger"),
        (unknown_event, "Laplace"),
        (negative_count, "-1"),
        (other_version, "99"),
        (too_few, "counts 3 private steps, its trainer state 4"),
        (nothing_spent, "counts 0 private steps, its trainer state 4"),
    ],
)
def test_failure_21_a_checkpoint_without_a_sound_ledger_is_refused(
    checkpointed: Path, tmp_path: Path, spoil: Callable[[dict[str, Any]], None], words: str
) -> None:
    path = copied(checkpointed, tmp_path)
    edit_state(path, spoil)
    run = trainer(path, seed=7)
    before = parameters(run.model)
    with pytest.raises(LedgerError, match=words) as caught:
        run.train(resume_from_checkpoint=True)
    assert "What to do" in str(caught.value)
    assert run.ledger.steps == 0
    assert same(before, parameters(run.model)), "refused before any weight was read"


def test_half_a_checkpoint_is_refused(checkpointed: Path, tmp_path: Path) -> None:
    path = copied(checkpointed, tmp_path)
    file = path / f"checkpoint-{SAVED}" / "trainer_state.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(LedgerError, match="trainer_state.json"):
        trainer(path, seed=7).train(resume_from_checkpoint=True)
    file.unlink()
    with pytest.raises(LedgerError, match="trainer_state.json"):
        trainer(path, seed=7).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_an_ordinary_trainer_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer

    run = trainer(tmp_path, seed=7)
    plain = Trainer(model=run.model, args=run.args, train_dataset=rows(), data_collator=run.data_collator)
    plain.train()
    with pytest.raises(LedgerError, match="no privacy ledger"):
        trainer(tmp_path, seed=7).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (rows(seed=1), {}, "not the data"),
        (rows()[::-1], {}, "not the data"),
        (rows(47), {}, "dataset_size: 48 in the ledger, 47 now"),
        (None, {"clipping_norm": 2.0}, "clipping_norm: 1.0 in the ledger, 2.0 now"),
        (None, {"target_epsilon": 3.0}, "target_epsilon: None in the ledger, 3.0 now"),
        (None, {"max_steps": STEPS + 1}, f"planned_steps: {STEPS} in the ledger, {STEPS + 1} now"),
        (None, {"gradient_accumulation_steps": 1}, "(?s)expected_batch_size: 8 .*4 now.*change gradient_acc.*times 2"),
    ],
    ids=["other data", "other order", "other n", "other clipping", "other budget", "other steps", "other batch"],
)
def test_failure_21_a_checkpoint_of_another_run_is_refused(
    checkpointed: Path, tmp_path: Path, data: Rows | None, changes: dict[str, Any], words: str
) -> None:
    run = trainer(copied(checkpointed, tmp_path), data, seed=7, **changes)
    with pytest.raises(LedgerError, match=words):
        run.train(resume_from_checkpoint=True)
    assert run.ledger.steps == 0


def test_a_seeded_run_cannot_be_continued_as_a_private_one(checkpointed: Path, tmp_path: Path) -> None:
    """Its first steps stay repeatable, so the report must go on saying that it is not private."""
    run = trainer(copied(checkpointed, tmp_path), seed=None)
    with pytest.raises(LedgerError, match="reproducible: True in the ledger, False now"):
        run.train(resume_from_checkpoint=True)


def test_a_lost_key_is_said_aloud(checkpointed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copied(checkpointed, tmp_path)
    (path / KEY_FILE).unlink()
    with caplog.at_level(logging.WARNING):
        trainer(path, seed=7).train(resume_from_checkpoint=True)
    assert "could not be compared" in caplog.text


# --- fingerprints -----------------------------------------------------------------------------------------------------

KEY = bytes(range(32))


class Images:
    """Fresh objects at every look, whose repr shows their address; alike in their first and last values."""

    def __init__(self, middle: int = 0) -> None:
        self.middle = middle

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        pixels = torch.zeros(40, 40)
        pixels[20, 20] = self.middle
        return {"image": Image.new("L", (4, 4), index), "pixels": pixels, "array": pixels.numpy(), "label": index}


def test_a_fingerprint_is_of_the_content() -> None:
    pytest.importorskip("PIL")
    kept = [Images(), Images()]
    one, two = (fingerprint(data, KEY) for data in kept)
    assert one == two is not None
    assert fingerprint(Images(middle=1), KEY) != one, "tensors are abbreviated when they are printed"
    assert fingerprint(Images(), KEY[::-1]) != one


class Augmented(Images):
    """Of one row in many, the pixels are drawn at each look; by a generator of its own, where there is one."""

    def __init__(self, middle: int = 0, own: bool = False) -> None:
        super().__init__(middle)
        self.generator = torch.Generator() if own else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = {"drawn": self.middle + torch.rand(3, generator=self.generator), "numpy": np.random.rand()}
        return {**drawn, "label": index + self.middle, "object": Opaque(index) if self.generator else random.random()}


class Opaque:
    """Without a content that can be looked into."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def test_rows_that_are_augmented_at_random_are_compared_all_the_same() -> None:
    states = torch.get_rng_state(), random.getstate()
    one = fingerprint(Augmented(), KEY)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    torch.rand(5)
    assert compare(one, fingerprint(Augmented(), KEY)) == (False, 0)
    assert compare(one, fingerprint(Augmented(middle=1), KEY)) == (True, 0)
    own = fingerprint(Augmented(own=True), KEY)
    assert list(own.values()).count(None) == 2, "of a generator of its own, and of what cannot be looked into"
    assert compare(own, fingerprint(Augmented(own=True), KEY)) == (False, 2)
    assert compare(own, fingerprint(Augmented(middle=1, own=True), KEY)) == (True, 2), "the labels differ"
    assert compare(one, fingerprint(Images(), KEY))[0], "other columns"


def test_a_transform_is_looked_behind() -> None:
    def data(first: int) -> Dataset:
        generator = np.random.default_rng()
        stored = Dataset.from_dict({"text": [f"words {i}" for i in range(first, first + 5)]})
        stored.set_transform(lambda rows: {"noisy": [generator.random() for _ in rows["text"]]})
        return stored

    one = fingerprint(data(0), KEY)
    assert compare(one, fingerprint(data(0), KEY)) == (False, 0)
    assert compare(one, fingerprint(data(1), KEY)) == (True, 0)


def test_columns_that_could_not_be_compared_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(list):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return {**row, "noise": secrets.randbits(60)} if isinstance(row, dict) else row

    trainer(tmp_path, Noisy(rows()), seed=7, remove_unused_columns=False).train()
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, Noisy(rows()), seed=7, remove_unused_columns=False).train(resume_from_checkpoint=True)
    assert "1 of 3 columns of the data could not be compared" in caplog.text
    with pytest.raises(LedgerError, match="not the data"):
        trainer(tmp_path, Noisy(rows(seed=1)), seed=7).train(
            resume_from_checkpoint=str(tmp_path / f"checkpoint-{SAVED}")
        )


def test_the_key_is_whole_secret_and_kept(tmp_path: Path) -> None:
    assert fingerprint_key(tmp_path, create=False) is None
    key = fingerprint_key(tmp_path, create=True)
    assert key is not None
    assert len(key) == 32
    assert fingerprint_key(tmp_path, create=True) == key
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o077 == 0
    (tmp_path / KEY_FILE).write_bytes(b"")
    assert fingerprint_key(tmp_path, create=True) is None, "half a key is no secret"
    (tmp_path / KEY_FILE).unlink()
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(LedgerError, match="cannot be read .*Is a directory"):
        trainer(tmp_path).train()


def test_no_secret_is_in_a_checkpoint(checkpointed: Path) -> None:
    key = fingerprint_key(checkpointed, create=False)
    assert key is not None
    for file in (checkpointed / f"checkpoint-{SAVED}").iterdir():
        content = file.read_bytes()
        assert key not in content
        assert key.hex().encode() not in content


@pytest.mark.parametrize(("target", "steps"), [(3.0, 4), (None, 4), (None, 6)])
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
