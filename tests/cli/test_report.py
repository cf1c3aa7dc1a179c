"""`hf-dp report`: what a run logged, as a table and as a figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from typer.testing import CliRunner

from hf_dp import PrivacyConfig
from hf_dp.accounting import Ledger
from hf_dp.cli import app
from hf_dp.cli.history import _is_of, draw_history, history_table
from hf_dp.errors import LedgerError
from hf_dp.hub import verify
from hf_dp.hub.upload import checked_files
from tests.training.workbench import make

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with a model, and a checkpoint with the log of 12 steps."""
    path = tmp_path_factory.mktemp("out")
    trainer = make(
        path, privacy=PrivacyConfig(noise_multiplier=2), max_steps=12, logging_steps=1, save_strategy="steps",
        save_steps=12,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return path


@pytest.mark.slow
def test_what_was_logged_is_a_table_and_a_figure(finished: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(finished), "--figure", str(tmp_path / "run.png")])
    assert done.exit_code == 0, done.output
    assert "What was logged" in done.stdout
    assert "clipped fraction" in done.stdout
    told = "Not private, exact numbers of the data: training loss and clipped fraction. Keep them to yourself."
    assert told in " ".join(done.stdout.split())
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    CliRunner().invoke(app, ["report", str(finished), "--figure", str(tmp_path / "run.svg")])
    assert "Not private" in (tmp_path / "run.svg").read_text(encoding="utf-8")
    said = json.loads(CliRunner().invoke(app, ["report", str(finished), "--json"]).stdout)
    assert sorted(map(int, said["logged_not_private"])) == list(range(1, 13))
    assert said["logged_not_private"]["12"]["epsilon"] == pytest.approx(said["report"]["epsilon"], rel=1e-3)


def test_a_log_that_was_saved_without_checkpoints_is_shown_and_stays_at_home(tmp_path: Path) -> None:
    trainer = make(tmp_path, privacy=PrivacyConfig(noise_multiplier=2), max_steps=2, logging_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    said = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).stdout)
    assert sorted(said["logged_not_private"]) == ["1", "2"]
    assert verify(tmp_path).private
    assert "trainer_state.json" not in checked_files(tmp_path)
    again = make(tmp_path, privacy=PrivacyConfig(noise_multiplier=2), max_steps=2)
    with pytest.raises(LedgerError, match=r"trainer_state\.json' has no privacy ledger"):
        again.train(resume_from_checkpoint=str(tmp_path))


@pytest.mark.parametrize(
    ("saved", "is_shown"),
    [
        ([("start", 1), ("training step", 5)], True), ([("start", 1)], True), ([], True),
        ([("start", 1), ("training step", 9), ("end", 1)], True), ([("start", 2), ("training step", 5)], False),
        ([("training step", 5)], False), ([("start", 1), ("training step", 3), ("end", 1)], False),
    ],
)  # fmt: skip
def test_a_log_is_shown_whose_ledger_is_a_beginning_or_goes_on(saved: list[tuple[str, int]], is_shown: bool) -> None:
    def made(entries: list[tuple[str, int]]) -> Ledger:
        ledger = Ledger({"planned_steps": 9})
        for label, count in entries:
            ledger.charge(dp_accounting.GaussianDpEvent(1.0), label, count)
        return ledger

    attributes = {"attributes": {"saved_ledger": {"ledger": made(saved).to_dict()}}}
    state = {"stateful_callbacks": {"PrivacyCallback": attributes}}
    assert _is_of(made([("start", 1), ("training step", 7)]), state) is is_shown


def test_the_budget_is_in_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("hf_dp.cli.plot.written", lambda figure, *_: drawn.append(figure))
    draw_history({1: {"epsilon": 1.0}, 2: {"epsilon": 2.0}}, 8.0, tmp_path / "run.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert low == 0
    assert high > 8


def test_no_epsilon_of_the_table_is_below_what_was_spent() -> None:
    table = history_table({1: {"epsilon": 7.99925, "loss": 0.69996}, 2: {"loss": 0.5}})
    assert [list(column.cells) for column in table.columns] == [["1", "2"], ["0.7", "0.5"], ["8", "-"]]


@pytest.mark.slow
def test_the_log_of_another_run_is_not_shown_and_none_is_refused_for_a_figure(finished: Path, tmp_path: Path) -> None:
    state = finished / "checkpoint-12" / "trainer_state.json"
    before = state.read_text(encoding="utf-8")
    values = json.loads(before)
    ledger = values["stateful_callbacks"]["PrivacyCallback"]["attributes"]["saved_ledger"]["ledger"]
    promise, entries = dict(ledger["promise"]), ledger["entries"]
    ledger["promise"]["planned_steps"] = 13
    another_promise = json.dumps(values)
    ledger.update(promise=promise, entries=[{**entries[0], "label": "token counts", "count": 1}, *entries])
    another_beginning = json.dumps(values)
    try:
        for text in (another_promise, another_beginning, "[]", "{"):
            state.write_text(text, encoding="utf-8")
            done = CliRunner().invoke(app, ["report", str(finished / "checkpoint-12")])
            assert done.exit_code == 0
            assert "What was logged" not in done.stdout
            drawn = CliRunner().invoke(app, ["report", str(finished), "--figure", str(tmp_path / "run.png")])
            assert drawn.exit_code == 2
            assert "no logged step of this run lies" in " ".join(drawn.stderr.split())
            assert not (tmp_path / "run.png").exists()
    finally:
        state.write_text(before, encoding="utf-8")
    for name in ("run", "run.gif"):
        assert CliRunner().invoke(app, ["report", str(finished), "--figure", str(tmp_path / name)]).exit_code == 2
        assert not (tmp_path / name).exists()
