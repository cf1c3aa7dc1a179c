"""A checkpoint is whole or not there: after a kill at any moment of a save, on a full disk, and beside halves."""

from __future__ import annotations

import errno
import json
import logging
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dp.errors import LedgerError
from hf_dp.hub.card import privacy_section
from hf_dp.training.resuming.checkpoints import finish, newest_whole, what_lacks
from hf_dp.training.resuming.own_checkpoints import found_checkpoint
from hf_dp.training.resuming.resume import SavedRun
from tests.crashes import digests, killed_everywhere
from tests.training.resuming.resumed import SAVED, STEPS, trainer
from tests.training.workbench import make, parameters, private, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")

NEWEST = f"checkpoint-{STEPS}"


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run with two checkpoints, to be copied and spoilt."""
    path = tmp_path_factory.mktemp("checkpointed") / "out"
    trainer(path, seed=7).train()
    return path


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to / "out"))


def branch(path: Path, **changes: Any) -> Any:
    """A run that has come to the step of the first checkpoint again, with other noise, and has not saved."""
    run = trainer(path, save_strategy="no", max_steps=SAVED, **changes)
    run.train()
    return run


@pytest.mark.slow
def test_failure_33_killed_while_a_checkpoint_is_written_over_the_old_or_the_new_one_is_whole(
    checkpointed: Path, tmp_path: Path
) -> None:
    path = copied(checkpointed, tmp_path)
    shutil.rmtree(path / NEWEST)
    run, found = branch(path), []
    privacy_section(run.privacy_report(), run.ledger, run.privacy)  # its numbers are known then, in each fork
    old = digests(path / f"checkpoint-{SAVED}")
    for _ in killed_everywhere(path, lambda: run._save_checkpoint(run.model, None)):
        assert newest_whole(str(path)) == str(path / f"checkpoint-{SAVED}")
        found.append(digests(path / f"checkpoint-{SAVED}"))
    new = found[-1]
    assert len(found) > 10, "hardly anything was tried"
    assert old.keys() == new.keys()
    assert [name for name in old if old[name] == new[name]] == ["config.json", "scheduler.pt"], "one branch"
    assert found == [old] * found.count(old) + [new] * found.count(new), "a mixture, or none"
    assert found.count(new) > 1, "killed before its last renaming the new one is whole, too"
    assert sorted(p.name for p in path.iterdir()) == ["_hf_dp_fingerprint_key", "_hf_dp_lock", f"checkpoint-{SAVED}"]
    again = trainer(path, max_steps=SAVED)
    again.train(resume_from_checkpoint=True)
    assert again.ledger.to_dict() == run.ledger.to_dict()
    assert all(torch.equal(one, two) for one, two in zip(again.model.parameters(), run.model.parameters(), strict=True))


@pytest.mark.slow
def test_killed_in_a_first_save_training_goes_on_from_the_checkpoint_before(
    checkpointed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(checkpointed, tmp_path)
    (path / "_saving").mkdir()
    (path / NEWEST).rename(path / "_saving" / NEWEST)
    (path / "_saving" / NEWEST / "rng_state.pth").unlink()
    run = trainer(path, seed=7)
    with caplog.at_level(logging.WARNING):
        run.train(resume_from_checkpoint=True)
    assert f"{NEWEST}: it was being written" in caplog.text
    assert run.ledger.steps == STEPS
    assert digests(path / NEWEST).keys() == digests(checkpointed / NEWEST).keys()
    assert not (path / "_saving").exists()


HALVES = {
    "trainer_state.json": "it has no trainer_state.json",
    "model.safetensors": "it has no weights",
    "optimizer.pt": "it has no optimizer",
    "rng_state.pth": "it has no rng_state",
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("cut", [True, False])
def test_a_half_is_passed_over_by_name_and_by_itself_refused(
    checkpointed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, cut: bool
) -> None:
    path = copied(checkpointed, tmp_path)
    file = path / NEWEST / name
    content = file.read_bytes()
    file.unlink()
    if cut:
        file.write_bytes(content[: len(content) // 2])
    lack = f"{name} {'cannot be read' if name.endswith('json') else 'is cut'}" if cut else HALVES[name]
    with caplog.at_level(logging.WARNING):
        assert newest_whole(str(path)) == str(path / f"checkpoint-{SAVED}")
    assert f"{NEWEST}: {lack}" in caplog.text
    with pytest.raises(LedgerError, match=name if cut else "not whole|cannot be read"):
        trainer(path, seed=7).train(resume_from_checkpoint=str(path / NEWEST))
    shutil.rmtree(path / f"checkpoint-{SAVED}")
    with pytest.raises(LedgerError, match=f"no checkpoint in .* is whole .*{lack}"):
        trainer(path, seed=7).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("seed", range(4))
def test_one_that_is_deleted_halfway_is_not_whole_or_is_read(checkpointed: Path, tmp_path: Path, seed: int) -> None:
    folder, found = copied(checkpointed, tmp_path) / NEWEST, []
    files = sorted(folder.iterdir())
    for file in random.Random(seed).sample(files, len(files)):
        file.unlink()
        if (lack := what_lacks(folder)) is None:
            assert SavedRun.read(folder).ledger.steps == STEPS, file.name
        found.append(lack)
    assert found[-1] is not None


class WritesAgain(TrainerCallback):
    """Saves the state by itself, and writes that of each checkpoint again."""

    trainer: Any = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.save_state()
        state.save_to_json(str(Path(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json")))


@pytest.mark.slow
def test_a_state_that_is_saved_in_between_takes_no_ledger_from_a_checkpoint(tmp_path: Path) -> None:
    run, again = trainer(tmp_path, seed=7), WritesAgain()
    again.trainer = run
    run.add_callback(again)
    run.train()
    assert SavedRun.read(tmp_path / NEWEST).ledger.steps == STEPS


def test_without_any_checkpoint_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer(tmp_path, seed=7).train(resume_from_checkpoint=True)


def test_a_checkpoint_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for place, found in (("someone/nowhere", "there is no folder 'someone/nowhere'"), (str(file), "but a file")):
        for resume in (
            lambda place=place: trainer(tmp_path, seed=7).train(resume_from_checkpoint=place),
            lambda place=place: found_checkpoint(Path(place), None, private()),
        ):
            with pytest.raises(LedgerError, match=found) as caught:
                resume()
            assert "folder checkpoint-N that is there, or True" in caught.value.fix


def test_a_folder_that_is_no_checkpoint_is_not_said_to_be_one_to_delete(tmp_path: Path) -> None:
    for name in ("checkpoint-2", "checkpoint-10", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "trainer_state.json").write_text("{}")  # Trainer's save_state() puts one there
    for place, found, way in (
        (tmp_path, "is no checkpoint: it has checkpoint-2, checkpoint-10.", "one of these, or True for the newest"),
        (tmp_path / "model", "is no checkpoint: it has no trainer_state.json.", "PrivacyConfig(after=...)"),
    ):
        for resume in (
            lambda place=place: trainer(tmp_path / "other", seed=7).train(resume_from_checkpoint=str(place)),
            lambda place=place: found_checkpoint(place, None, private()),
        ):
            with pytest.raises(LedgerError) as caught:
                resume()
            assert found in str(caught.value)
            assert way in caught.value.fix
            assert "delete" not in caught.value.fix


@pytest.mark.slow
def test_what_trainer_does_with_checkpoints_stays(tmp_path: Path) -> None:
    """Rotation, the best one, callbacks that write into the new one, and checkpoints of the model alone."""

    class Note(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "note").write_text("mine")

    first = make(
        tmp_path / "one", parts={"eval_dataset": rows(8, seed=5), "callbacks": [Note()]}, max_steps=6,
        save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, save_only_model=True,
    )  # fmt: skip
    first.train()
    best = first.state.best_model_checkpoint
    assert Path(best).parent == tmp_path / "one"
    kept = {path.name for path in (tmp_path / "one").glob("checkpoint-*")}
    other = "checkpoint-5" if best.endswith("-6") else Path(best).name
    assert kept == {other, "checkpoint-6"}
    assert all((tmp_path / "one" / name / "note").exists() for name in kept)
    said = json.loads((Path(best) / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert said == best, "not where it was written aside"
    # In a directory that was moved Trainer finds the best checkpoint beside the new one.
    shutil.move(tmp_path / "one", tmp_path / "two")
    first.args.output_dir = str(tmp_path / "two")
    first._save_checkpoint(first.model, None)
    assert first.state.best_model_checkpoint == str(tmp_path / "two" / Path(best).name)


def with_the_best(path: Path, **changes: Any) -> Any:
    """A trainer that loads the worst one at its end, which is not the last."""
    values = {
        "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    data = {"train_dataset": rows(seed=changes.pop("data", 0)), "eval_dataset": rows(8, seed=5)}
    return make(path, parts=data, **{**values, **changes})


@pytest.mark.slow
def test_failure_33_in_the_old_place_of_the_best_checkpoint_lies_that_of_another_training(tmp_path: Path) -> None:
    here, moved = tmp_path / "here", tmp_path / "moved"
    first = with_the_best(here)
    first.train()
    best = Path(first.state.best_model_checkpoint).name
    assert best != "checkpoint-4"
    shutil.move(here, moved)
    with_the_best(here, data=9, save_total_limit=None).train()
    again = with_the_best(moved)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(moved / best)
    assert same(parameters(again.model), parameters(first.model))
    shutil.rmtree(moved / best)
    with pytest.raises(LedgerError, match="the best checkpoint, .*the training data is not the data"):
        with_the_best(moved).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_best_checkpoint_that_a_training_wrote_over_which_began_anew_is_refused(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == best:
                raise KeyboardInterrupt

    def begun(**changes: Any) -> Any:
        return with_the_best(tmp_path, save_total_limit=None, privacy=private(seed=None), **changes)

    best = 4
    while best == 4:  # of noise that nobody knows; another one must begin before the last
        shutil.rmtree(tmp_path)
        (first := begun()).train()
        best = first.state.best_global_step
    (second := begun(seed=7)).add_callback(Stop())
    with pytest.raises(KeyboardInterrupt):
        second.train()
    with pytest.raises(LedgerError, match="logged something else before it"):
        begun().train(resume_from_checkpoint=True)


def test_a_best_checkpoint_that_was_changed_is_not_loaded(tmp_path: Path) -> None:
    class Spoil(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                file = Path(state.best_model_checkpoint) / "model.safetensors"
                content = file.read_bytes()
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    run = with_the_best(tmp_path)
    run.add_callback(Spoil())
    with pytest.raises(LedgerError, match="the best checkpoint, .* model.safetensors: SHA-256"):
        run.train()


@pytest.mark.few(1)
@pytest.mark.parametrize("bytes_left", [300, 20_000])
def test_a_full_disk_is_named_and_nothing_is_lost(checkpointed: Path, tmp_path: Path, bytes_left: int) -> None:
    path = copied(checkpointed, tmp_path)
    run, before = branch(path), digests(path)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
    try:
        with pytest.raises(OSError, match="No space to write .* bytes are free on this disk.*as they were") as caught:
            run._save_checkpoint(run.model, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.ENOSPC
    assert digests(path) == before
    run._save_checkpoint(run.model, None)
    assert digests(path / f"checkpoint-{SAVED}") != digests(checkpointed / f"checkpoint-{SAVED}")


def test_a_renaming_that_was_broken_off_is_finished(checkpointed: Path, tmp_path: Path) -> None:
    path = copied(checkpointed, tmp_path)
    (path / "_saved").mkdir()
    (path / NEWEST).rename(path / "_saved" / NEWEST)
    finish(str(path))
    assert digests(path) == digests(checkpointed)


def test_what_another_training_is_writing_is_left_where_one_goes_on_from_its_checkpoint(
    checkpointed: Path, tmp_path: Path
) -> None:
    path, older = copied(checkpointed, tmp_path), f"checkpoint-{SAVED}"
    for folder in ("_saved", "_saving"):
        (path / folder).mkdir()
    (path / "_saved" / ".nfs01").touch()  # as file systems leave it, so that it stays
    (path / "_saving" / "checkpoint-9").mkdir()
    assert found_checkpoint(path / older, tmp_path / "new", private()) == path / older
    assert (path / "_saving" / "checkpoint-9").exists()
    (path / older).rename(path / "_saved" / older)
    assert found_checkpoint(path / older, tmp_path / "new", private()) == path / older
    (path / "_saving" / "checkpoint-9").mkdir(parents=True)
    found_checkpoint(path / older, path, private())
    assert not (path / "_saving").exists(), "one's own"


@pytest.mark.slow
def test_of_two_trainings_in_turns_the_refusal_names_the_checkpoints_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    mine = trainer(path, seed=7)
    mine.train()
    trainer(path, seed=7, max_steps=STEPS + 2, save_steps=STEPS + 2, per_device_train_batch_size=1).train()
    newest = path / f"checkpoint-{STEPS + 2}"
    assert newest_whole(str(path)) == str(newest)
    (path / NEWEST / "rng_state.pth").unlink()
    with pytest.raises(LedgerError, match="belongs to another run") as caught:
        trainer(path, seed=7).train(resume_from_checkpoint=True)
    own = f"in resume_from_checkpoint: {str(path / f'checkpoint-{SAVED}')!r}."
    assert own in str(caught.value), "the other one is a half"
    with pytest.raises(LedgerError, match="belongs to another run") as caught:
        trainer(path, seed=7, max_steps=STEPS + 4).train(resume_from_checkpoint=True)
    assert "Or name" not in str(caught.value)
    resumed = trainer(path, seed=7)
    resumed.train(resume_from_checkpoint=str(path / f"checkpoint-{SAVED}"))
    assert resumed.ledger.steps == STEPS


@pytest.mark.slow
def test_of_two_trainings_on_other_data_the_refusal_names_this_ones(tmp_path: Path) -> None:
    path = tmp_path / "out"
    trainer(path, seed=7).train()
    for name in (f"checkpoint-{SAVED}", NEWEST):
        shutil.move(path / name, path / f"_{name}")
    trainer(path, rows(seed=9), seed=7).train()
    (path / f"checkpoint-{SAVED}").rename(path / "elsewhere")
    (path / f"_checkpoint-{SAVED}").rename(path / f"checkpoint-{SAVED}")
    with pytest.raises(LedgerError, match="is not the data that the checkpoint") as caught:
        trainer(path, seed=7).train(resume_from_checkpoint=True)
    assert f"in resume_from_checkpoint: {str(path / f'checkpoint-{SAVED}')!r}." in str(caught.value)
