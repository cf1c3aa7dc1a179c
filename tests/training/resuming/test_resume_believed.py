"""A checkpoint is believed where all that it says of what was spent agrees; what was damaged is named."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_dp.accounting import Ledger
from hf_dp.data.fingerprint import KEY_FILE
from hf_dp.errors import LedgerError
from hf_dp.hub.checkpoint import _of_logs, seal
from hf_dp.training.resuming.resume import SavedRun
from tests.hub.forging import in_record
from tests.training.resuming.resumed import SAVED, STEPS, copied, edit_state, saved_ledger, trainer
from tests.training.workbench import parameters, same

pytestmark = pytest.mark.usefixtures("checked_once")

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that stopped after its first checkpoint, to be copied and spoilt."""
    path = tmp_path_factory.mktemp("checkpointed") / "out"
    trainer(path, seed=7, logging_steps=2).train()
    shutil.rmtree(path / f"checkpoint-{STEPS}")
    return path


@pytest.fixture
def copy(checkpointed: Path, tmp_path: Path) -> Path:
    return copied(checkpointed, tmp_path)


def checkpoint(path: Path) -> Path:
    return next(path.glob("checkpoint-*"))


def in_state(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda path: edit_state(path, change)


def in_entry(**values: Any) -> Change:
    """Changes the only entry of the ledger in trainer_state.json."""

    def change(state: dict[str, Any]) -> None:
        entry = saved_ledger(state)["ledger"]["entries"][0]
        for name, value in values.items():
            place = next(part for part in (entry, entry["event"], entry["event"]["event"]) if name in part)
            place[name] = value

    return in_state(change)


def in_promise(**values: Any) -> Change:
    return in_state(lambda state: saved_ledger(state)["ledger"]["promise"].update(values))


def in_its_record(*path: Any, to: Any) -> Change:
    return lambda directory: in_record(*path, to=to)(checkpoint(directory))


def logged(**values: Any) -> Change:
    entry = {"step": 2, "epsilon": 0.1, "noise_multiplier": 1.0, **values}
    return in_state(lambda state: state["log_history"].append(entry))


def set_back(path: Path) -> None:
    in_entry(count=3)(path)
    edit_state(path, lambda state: state.update(global_step=3, log_history=[]))


def renamed(path: Path) -> None:
    checkpoint(path).rename(path / "checkpoint-3")


def flipped(name: str) -> Change:
    def change(path: Path) -> None:
        content = bytearray((checkpoint(path) / name).read_bytes())
        content[-2] ^= 1
        (checkpoint(path) / name).write_bytes(content)

    return change


def nested(place: str) -> Change:
    """Lists in lists, deeper than Python follows them, in trainer_state.json."""

    def change(path: Path) -> None:
        file = checkpoint(path) / "trainer_state.json"
        state = json.loads(file.read_text())
        if place == "log_history":
            state[place].append({"step": 1, "x": "@"})
        else:
            saved = saved_ledger(state)
            (saved["ledger"] if place == "promise" else saved)[place] = {"x": "@"}
        file.write_text(json.dumps(state).replace('"@"', "[" * 900 + "]" * 900))

    return change


def without_key(path: Path) -> None:
    (path / KEY_FILE).unlink()


ENTRY = ("ledger", "entries", 0)
BELIEVED_BEFORE: dict[str, tuple[list[Change], str]] = {
    "noise x 8": ([in_entry(noise_multiplier=8.0)], "not those of its promise"),
    "q is 0": ([in_entry(sampling_probability=0.0)], "not those of its promise"),
    "noise, with the promise": (
        [in_entry(noise_multiplier=8.0), in_promise(calibrated_noise_multiplier=8.0)],
        "is not that in privacy.json",
    ),
    "noise, with the promise and the record": (
        [in_entry(noise_multiplier=8.0), in_promise(calibrated_noise_multiplier=8.0),
         in_its_record(*ENTRY, "event", "event", "noise_multiplier", to=8.0),
         in_its_record("ledger", "promise", "calibrated_noise_multiplier", to=8.0)],
        "calibrated_noise_multiplier: 1.0 claimed, 8.0 in the ledger",
    ),
    "the promise alone": ([in_promise(delta=1e-9)], "or its promise is not"),
    "no promise": ([in_state(lambda state: saved_ledger(state)["ledger"].update(promise={}))], "promise has no noise"),
    "counts": ([in_entry(count=5)], "is not that in privacy.json"),
    "counts set back": ([set_back], "of step 3, the folder's name of step 4"),
    "counts set back, and renamed": ([set_back, renamed], "is not that in privacy.json"),
    "counts set back, and in the record": (
        [set_back, renamed, in_its_record(*ENTRY, "count", to=3)], "steps: claimed 4, in the ledger 3"
    ),
    "the step": ([in_state(lambda state: state.update(global_step=0))], "of step 0, the folder's name of step 4"),
    "the claim": ([in_its_record("report", "epsilon", to=0.5)], "epsilon (PLD): claimed 0.5"),
    "the config": ([in_its_record("config", "noise_multiplier", to=8.0)], "mechanism, config and ledger's promise"),
    "logged epsilon": ([logged(epsilon=10.76)], "log_history has epsilon 10.76 at step 2"),
    "logged noise": ([logged(noise_multiplier=0.5)], "log_history has noise multiplier 0.5"),
    "logged step": ([logged(step=6)], "log_history goes on to step 6"),
    "weights": ([flipped("model.safetensors")], "model.safetensors: SHA-256"),
    "config.json": ([flipped("config.json")], "config.json: SHA-256"),
    "no record": ([lambda path: (checkpoint(path) / "privacy.json").unlink()], "it has weights, and no privacy.json"),
    "another label": ([in_entry(label="evaluation")], "counts 0 private steps"),
    "data": ([in_state(lambda state: saved_ledger(state).update(data=None))], "does not fit the seal"),
    "the seal": ([in_state(lambda state: saved_ledger(state).pop("seal"))], "does not fit the seal"),
    "Trainer's count": ([in_state(lambda state: state.update(total_flos=None))], "total_flos in trainer_state.json is"),
    "no logs": ([in_state(lambda state: state.update(log_history=[1]))], "log_history in trainer_state.json is no"),
    "a length": ([in_state(lambda state: state.update(max_steps=9))], "does not fit the seal"),
    "an unknown field": ([in_state(lambda state: state.update(x=1))], "does not fit the seal"),
    "a deep state": (
        [lambda path: (checkpoint(path) / "trainer_state.json").write_text("[" * 100_000)], "cannot be read"
    ),
    "a key that is a folder": (
        [lambda path: (path / KEY_FILE).unlink(), lambda path: (path / KEY_FILE).mkdir()], "the key .* cannot be read"
    ),
    "a deep promise": ([nested("promise")], "trainer_state.json' cannot be read (nested"),
    "deep logs, no key": ([nested("log_history"), without_key], "trainer_state.json' cannot be read (nested"),
    "deep data, no key": ([nested("data"), without_key], "trainer_state.json' cannot be read (nested"),
    "a batch size in words, no key": (
        [in_state(lambda state: state.update(train_batch_size="8")), without_key],
        "train_batch_size in trainer_state.json is '8'",
    ),
    "an interval in words, no key": (
        [in_state(lambda state: state.update(save_steps="4")), without_key], "save_steps in trainer_state.json is '4'"
    ),
    "half a character": ([in_entry(label="step\ud800")], "the label"),
}  # fmt: skip


@pytest.mark.parametrize("case", BELIEVED_BEFORE)
def test_failure_33_a_checkpoint_that_contradicts_itself_is_refused(copy: Path, case: str) -> None:
    changes, words = BELIEVED_BEFORE[case]
    assert SavedRun.read(checkpoint(copy)).ledger.steps == SAVED
    for change in changes:
        change(copy)
    with pytest.raises(LedgerError, match=words.replace("(", r"\(").replace(")", r"\)")) as caught:
        SavedRun.read(checkpoint(copy))
    assert len(str(caught.value)) < 5000
    assert str(caught.value).encode()


@pytest.mark.parametrize(("noise", "is_believed"), [(0.345188, True), (0.3451, True), (0.3452, False)])
def test_noise_is_logged_as_it_is_or_rounded_down(noise: float, is_believed: bool) -> None:
    ledger = Ledger({"calibrated_noise_multiplier": 0.345188, "delta": 1e-3, "accountant": "pld"})
    state = {"global_step": 2, "log_history": [{"step": 2, "noise_multiplier": noise}]}
    assert (not list(_of_logs(state, ledger))) is is_believed


def test_no_weight_is_read_of_a_checkpoint_that_contradicts_itself(copy: Path) -> None:
    in_entry(noise_multiplier=8.0)(copy)
    run = trainer(copy, seed=7)
    before = parameters(run.model)
    with pytest.raises(LedgerError, match="contradicts itself"):
        run.train(resume_from_checkpoint=True)
    assert run.ledger.steps == 0
    assert same(before, parameters(run.model))


def test_what_is_changed_in_all_places_alike_is_seen_by_the_key_alone(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """docs/proof.md says so: without the key nothing shows it."""
    for change in (set_back, renamed, in_its_record(*ENTRY, "count", to=3), in_its_record("report", "steps", to=3)):
        change(copy)
    values = json.loads((checkpoint(copy) / "privacy.json").read_text())
    forged, delta = Ledger.from_dict(values["ledger"]), values["report"]["delta"]
    in_its_record("report", "epsilon", to=forged.epsilon(delta))(copy)
    in_its_record("report", "epsilon_rdp", to=forged.epsilon(delta, "rdp"))(copy)
    with pytest.raises(LedgerError, match="does not fit the seal"):
        SavedRun.read(checkpoint(copy))
    (copy / KEY_FILE).unlink()
    assert SavedRun.read(checkpoint(copy)).ledger.steps == 3


def test_a_state_that_trainer_cannot_read_is_refused_without_the_key_too(copy: Path) -> None:
    edit_state(copy, lambda state: state.update(x=1))
    (copy / KEY_FILE).unlink()
    with pytest.raises(LedgerError, match=r"^trainer_state.json in .* cannot be loaded \(TypeError"):
        trainer(copy, seed=7).train(resume_from_checkpoint=True)


class Logs(TrainerCallback):
    """What evaluation logs with metrics for each class, and what a callback adds to a checkpoint of its own."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scores = dict.fromkeys(range(12), 0.5)
        state.log_history.append({"step": state.global_step, "f1": scores, "nan": math.nan, "top": (1, math.inf)})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.log_history.append({"step": state.global_step, "saved": True})
        state.save_to_json(os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json"))


def test_whatever_was_logged_an_unchanged_checkpoint_is_resumed(tmp_path: Path) -> None:
    run = trainer(tmp_path / "out", seed=7)
    run.add_callback(Logs())
    run.train()
    for step in (SAVED, STEPS):
        assert SavedRun.read(tmp_path / "out" / f"checkpoint-{step}").ledger.steps == step


def test_a_seal_is_of_the_state_as_json_gives_it_back() -> None:
    state = {"trial_params": dict.fromkeys(range(12), (math.nan, math.inf)), "global_step": 1}
    read = json.loads(json.dumps(state, sort_keys=True))
    assert seal(b"k" * 32, {}, None, state) == seal(b"k" * 32, {}, None, read)
    assert seal(b"k" * 32, {}, None, state) != seal(b"k" * 32, {}, None, {**read, "global_step": 2})
    assert seal(b"k" * 32, {}, None, state) != seal(b"k" * 32, {}, None, state, {"weight": "0 0"})


def test_a_seal_that_no_whole_key_checks_is_said(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / KEY_FILE).write_bytes(b"abc")
    with caplog.at_level(logging.WARNING):
        assert SavedRun.read(checkpoint(copy)).ledger.steps == SAVED
    assert "The seal of" in caplog.text
    assert "was not checked" in caplog.text


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_damage_is_refused_by_the_name_of_the_file(copy: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (checkpoint(copy) / name).write_bytes(b"PK\x03\x04 and no more")
    run = trainer(copy, seed=7)
    with caplog.at_level(logging.ERROR), pytest.raises(LedgerError, match=f"is not whole: {name} is cut"):
        run.train(resume_from_checkpoint=str(checkpoint(copy)))
    assert run.ledger.steps in (0, SAVED), "nothing was spent"
