"""A claim about users is none about single examples: what the ledger was opened for is not left out of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_dp import PrivacyConfig
from hf_dp.hub import open_source, verify
from tests.hub.forging import failed, in_record, seal
from tests.training.workbench import rows, saved_by

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "out"
    data = [{**row, "user": f"u{i % 30}"} for i, row in enumerate(rows())]
    privacy = PrivacyConfig(target_epsilon=8.0, accountant="rdp", unit="user", max_examples_per_unit=3)
    return saved_by(path, privacy=privacy, parts={"train_dataset": data}, remove_unused_columns=False, max_steps=1)


@pytest.mark.slow
def test_a_unit_that_the_ledger_names_is_not_left_out(saved: Path, tmp_path: Path) -> None:
    assert verify(saved).private
    number = open_source(saved).record().mechanism.unit.number
    forged = Path(shutil.copytree(saved, tmp_path / "forged"))
    for change in (
        in_record("config", "unit", to=None),
        in_record("config", "max_examples_per_unit", to=None),
        in_record("mechanism", "unit", to={"kind": "example", "number": number}),
        in_record("report", "unit", to="one training example"),
    ):
        change(forged)
    seal(forged)
    assert "mechanism, config and ledger's promise" in failed(forged)


def test_a_budget_that_was_not_asked_for_is_noticed(saved: Path, tmp_path: Path) -> None:
    forged = Path(shutil.copytree(saved, tmp_path / "forged"))
    in_record("ledger", "promise", "target_tpr", to=0.02)(forged)
    seal(forged)
    assert "mechanism, config and ledger's promise" in failed(forged)


def test_a_record_that_takes_the_column_for_a_noun_follows_as_it_did(saved: Path, tmp_path: Path) -> None:
    """0.1.0.dev3 wrote "of one user together", whatever the column is called."""
    older = Path(shutil.copytree(saved, tmp_path / "older"))
    in_record("report", "versions", "hf_dp", to="0.1.0.dev3")(older)
    in_record("report", "unit", to="all training examples of one user together, at most 3 in a step")(older)
    seal(older)
    assert failed(older) == ""
    in_record("report", "unit", to="all training examples of one user together, at most 2 in a step")(older)
    seal(older)
    assert "claim and mechanism" in failed(older)
