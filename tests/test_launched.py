"""An error of one process of many is seen once, and last; accelerate that starts one process in place of many."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import hf_dp.agreement as agreement
import hf_dp.launched as launched
from hf_dp.cli.common import refusals
from hf_dp.errors import ConfigurationError, RanksError

REFUSAL = ConfigurationError("what was found.", why="a reason.", fix="a way out.")
LOST = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Connection closed by peer")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the process waited for its turn."""
    found: list[float] = []
    monkeypatch.setattr(launched.time, "sleep", found.append)
    return found


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Path]:
    """Makes this process one of two of torchrun; gives the file that it prints last."""

    def become(number: int) -> Path:
        for name, value in {
            "WORLD_SIZE": "2",
            "RANK": str(number),
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "e"),
        }.items():
            monkeypatch.setenv(name, value)
        return tmp_path / "e"

    return become


def test_a_refusal_is_said_by_torchrun_alone(tmp_path: Path) -> None:
    code = "from hf_dp import PrivacyConfig; PrivacyConfig(target_epsilon=-1)"
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    for extra, is_said in (({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error")}, False), ({}, True)):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**environment, **extra}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr.count("target_epsilon=-1.") == is_said, done.stderr
    # As torchrun reads it.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error"))
    *_, why, fix, line = str(ChildFailedError("script.py", {0: failure})).splitlines()
    assert "Why this is refused" in why
    assert "What to do: give a positive epsilon" in fix
    assert set(line) == {"="}


@pytest.mark.parametrize(
    ("number", "error", "waits"),
    [(0, REFUSAL, False), (1, REFUSAL, True), (0, LOST, True), (0, RanksError("a", why="b", fix="c"), True)],
)
def test_who_knows_less_waits(
    rank: Callable[[int], Path], slept: list[float], number: int, error: Exception, waits: bool
) -> None:
    path = rank(number)
    assert launched.hand_over(error)
    assert bool(slept) == waits
    assert str(error) in json.loads(path.read_text())["message"]["message"]


def test_of_other_errors_the_traceback_stays(rank: Callable[[int], Path]) -> None:
    rank(0)
    seen: list[BaseException] = []
    for error in (OSError("a row"), REFUSAL, KeyboardInterrupt()):
        launched._last_words(lambda kind, error, traceback: seen.append(error), type(error), error, None)
    assert [type(error) for error in seen] == [OSError, KeyboardInterrupt]


def test_a_file_that_cannot_be_written(rank: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    rank(0).mkdir()
    with pytest.raises(typer.Exit), refusals():
        raise REFUSAL
    assert "what was found" in capsys.readouterr().err


def test_a_command_among_many(rank: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = rank(0)
    with pytest.raises(typer.Exit) as ended, refusals():
        raise REFUSAL
    assert ended.value.exit_code == 2
    assert "what was found" not in capsys.readouterr().err
    assert "what was found" in path.read_text()


def test_one_process_is_as_ever(monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert not launched.hand_over(REFUSAL)
    assert launched.is_first()
    assert slept == []


@pytest.mark.parametrize(
    ("environment", "warns"),
    [
        # As `accelerate launch --cpu --num_processes 2` sets it, and with --num_processes 1.
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, True),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, False),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}, False),
    ],
)
def test_accelerate_that_starts_one_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, environment: dict[str, str], warns: bool
) -> None:
    for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        agreement.warn_if_alone()
    assert ("torchrun --nproc-per-node" in caplog.text) == warns


def test_every_warning_is_of_the_whole_run() -> None:
    """By `ranks.warn`, or by `warnings.warn` on the first rank alone."""
    package = Path(launched.__file__).parent
    found = {
        path.name: len(re.findall(r"logger\.warning\(|warnings\.warn\(", path.read_text(encoding="utf-8")))
        for path in package.glob("**/*.py")
    }
    known = {"ranks.py": 1, "target.py": 1, "trl.py": 1}
    assert {name: count for name, count in found.items() if count} == known
