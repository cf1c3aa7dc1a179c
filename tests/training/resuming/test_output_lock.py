"""Two trainings in one output directory: the second is refused, one that was killed leaves nothing behind, and one that
begins anew is told of checkpoints."""

from __future__ import annotations

import errno
import os
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
from tests.training.workbench import classifier, make, private


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
