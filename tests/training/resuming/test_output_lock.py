"""Two trainings in one output directory: the second is refused, one that was killed leaves nothing behind, and one that
begins anew, or goes back, is told of checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hf_dp.errors import ConfigurationError
from hf_dp.training.resuming import output_lock
from hf_dp.training.resuming.output_lock import alone_in
from tests.crashes import ended, forked
from tests.training.own_loops import begun
from tests.training.workbench import classifier, make, private, saved_by


def test_the_lock_of_another_process_holds_until_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "_PATIENCE", 0.1)
    reader, writer = os.pipe()

    def hold() -> None:
        with alone_in(tmp_path):
            os.write(writer, b"held")
            time.sleep(600)

    other = forked(hold)
    os.close(writer)
    try:
        assert os.read(reader, 9) == b"held"
        with pytest.raises(ConfigurationError, match="another training writes into"), alone_in(tmp_path):
            pass
    finally:
        os.close(reader)
        os.kill(other, signal.SIGKILL)
        assert ended(other) == signal.SIGKILL
    with alone_in(tmp_path):
        pass


def test_in_one_process_it_is_free_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "_PATIENCE", 0.1)

    def fails() -> None:
        with alone_in(tmp_path):
            with pytest.raises(ConfigurationError, match="another training"), alone_in(tmp_path):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    with alone_in(tmp_path / "new"), alone_in(tmp_path):
        pass


def test_a_place_without_locks_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(output_lock.FileLock, "acquire", refused)
    with alone_in(tmp_path):
        assert "cannot be locked" in caplog.text


@pytest.mark.parametrize("name", ["file", "file/out"])
def test_what_is_no_directory_is_refused_before_anything_is_paid_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be made"):
        begun(classifier(), output_dir=tmp_path / name)


@pytest.mark.usefixtures("checked_once")
@pytest.mark.slow
def test_a_training_that_begins_anew_is_told_of_the_checkpoints_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(**privacy: Any) -> Any:
        return make(tmp_path, privacy=private(**privacy), max_steps=2, save_strategy="steps", save_steps=1)

    def told() -> str:
        found = [one.getMessage() for one in caplog.records if "of an earlier training" in one.getMessage()]
        caplog.clear()
        return "".join(found)

    first = begin()
    first.train()
    first.train()  # its ledger goes on
    assert told() == ""
    begin().train(resume_from_checkpoint=True)
    begin(after=str(tmp_path / "checkpoint-2")).train()
    assert told() == ""
    begin().train()
    said = told()
    assert "has checkpoint-1, checkpoint-2 of an earlier training, and this one begins anew" in said
    assert "resume_from_checkpoint=True" in said
    run, _, _ = begun(classifier(), output_dir=tmp_path)
    run.end()
    assert told() == said


@pytest.mark.usefixtures("checked_once")
def test_and_of_a_model_that_one_has_saved_without_any(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_by(tmp_path, privacy=private(seed=None), max_steps=1)
    caplog.clear()
    make(tmp_path, privacy=private(seed=None), max_steps=1).train()
    said = "has a saved model (of 1 steps) of an earlier training, and this one begins anew"
    assert said in caplog.text
    assert "resume_from_checkpoint" not in caplog.text
    for resume in (None, True):
        caplog.clear()
        run, _, _ = begun(classifier(), private(seed=None), resume, output_dir=tmp_path)
        run.end()
        assert said in caplog.text


def goes_on(path: Path) -> Any:
    """A trainer in a process of its own."""
    return make(path, privacy=private(seed=None), max_steps=3, save_strategy="steps", save_steps=1)


def told_of_more(caplog: pytest.LogCaptureFixture) -> str:
    found = [one.getMessage() for one in caplog.records if "more private steps" in one.getMessage()]
    caplog.clear()
    return "".join(found)


@pytest.mark.usefixtures("checked_once")
def test_and_where_the_promise_names_a_training_from_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, here = saved_by(tmp_path / "before", privacy=private(seed=None), max_steps=1), tmp_path / "here"
    values: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    said = list[bool]()
    for after in (before, before, [before, here / "checkpoint-1"]):
        caplog.clear()
        places = [str(place) for place in after] if isinstance(after, list) else str(after)
        make(here, privacy=private(seed=None, after=places), **values).train()
        said.append("has checkpoint-1 of an earlier training, and this one begins anew" in caplog.text)
    assert said == [False, True, False]


@pytest.mark.usefixtures("checked_once")
def test_a_training_that_goes_back_is_told_of_what_has_more_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those are in no ledger that goes on from before them, and whoever saw what came of them has seen it."""
    first = goes_on(tmp_path / "out")
    first.train()
    first.save_model()
    one, two = (shutil.copytree(tmp_path / "out", tmp_path / name) for name in ("one", "two"))
    goes_on(tmp_path / "out").train(resume_from_checkpoint=True)
    first.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))  # its ledger has them all
    assert told_of_more(caplog) == ""
    goes_on(one).train(resume_from_checkpoint=str(one / "checkpoint-1"))
    said = told_of_more(caplog)
    assert f"{str(one)!r} has checkpoint-2 (of 2), checkpoint-3 (of 3), a saved model (of 3), of more private" in said
    assert "steps than 'checkpoint-1' (of 1)" in said
    for number in (2, 3):
        shutil.rmtree(two / f"checkpoint-{number}")
    goes_on(two).train(resume_from_checkpoint=True)
    assert "has a saved model (of 3), of more private steps than 'checkpoint-1' (of 1)" in told_of_more(caplog)


@pytest.mark.usefixtures("checked_once")
def test_so_is_a_loop_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, optimizer, scheduler = begun(classifier(), private(seed=None), steps=2, output_dir=tmp_path)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
        scheduler.step()
        run.save_checkpoint()
    for number, said in ((2, ""), (1, "has checkpoint-2 (of 2), of more private steps than 'checkpoint-1' (of 1)")):
        again, _, _ = begun(
            classifier(), private(seed=None), tmp_path / f"checkpoint-{number}", steps=2, output_dir=tmp_path
        )
        again.end()
        found = told_of_more(caplog)
        assert said in found
        assert bool(said) == bool(found)


@pytest.mark.usefixtures("checked_once")
def test_of_a_training_before_that_went_on_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record in the middle of a training has none of the steps that were made after it."""
    first = goes_on(tmp_path / "first")
    first.train()
    first.save_model()
    for name, said in (("", ""), ("checkpoint-3", ""), ("checkpoint-2", "checkpoint-3 (of 3), a saved model (of 3)")):
        place = tmp_path / "first" / name
        caplog.clear()
        make(tmp_path / "second", privacy=private(seed=None, after=str(place)), max_steps=1)
        found = told_of_more(caplog)
        assert bool(said) == bool(found)
        assert f"{said}, of more private steps than {place.name!r} (of 2), which after= names" in found or not said
    shutil.copytree(tmp_path / "first" / "checkpoint-1", tmp_path / "first", dirs_exist_ok=True)
    make(tmp_path / "second", privacy=private(seed=None, after=str(tmp_path / "first")), max_steps=1)
    assert "checkpoint-2 (of 2), checkpoint-3 (of 3), of more private steps than 'first' (of 1)" in told_of_more(caplog)
