"""A budget in the language of attacks: in training, resumed, on the card, and held against the ledger."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_dp import PrivacyConfig
from hf_dp.accounting.risk import group_epsilons, groups_in_words, risk
from hf_dp.errors import BudgetExceededError, LedgerError
from hf_dp.hub import load_report, open_source, verify
from tests.hub.forging import digest_anew, failed, in_card, in_record, invoke, seal
from tests.training.workbench import make

pytestmark = pytest.mark.usefixtures("checked_once")

Change = Callable[[Path], None]
BUDGET = PrivacyConfig(target_tpr=0.3, at_fpr=0.12)
EVERYWHERE = [("report",), ("config",), ("ledger", "promise")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("found") / "out"
    run = make(path, privacy=BUDGET, save_strategy="steps", save_steps=2)
    run.train()
    run.save_model()
    with pytest.raises(BudgetExceededError, match=r"target_tpr=0.3, at_fpr=0.12"):
        run.train()
    assert len(run.ledger.entries) == 1
    return path


@pytest.fixture
def mine(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "mine"))


@pytest.mark.slow
def test_it_is_kept_and_said(saved: Path) -> None:
    report, found = load_report(saved), {check.name: check.found for check in verify(saved).checks if check.passed}
    assert (report.target_epsilon, report.target_tpr, report.at_fpr) == (None, 0.3, 0.12)
    assert found["budget"].startswith("an attack finds 0.29")
    assert verify(saved).private
    assert "of a budget of 30% found at 12% false positives" in invoke("report", str(saved)).stdout
    card = (saved / "README.md").read_text(encoding="utf-8")
    of_ledger = risk(open_source(saved).record().ledger.event, (0.001, 0.01, 0.1, 0.12))
    assert "| budget of attacks | at most 30% found, while 12% of the others are taken for used |" in card
    assert str(of_ledger) in card
    assert (
        groups_in_words(group_epsilons(open_source(saved).record().ledger.event, report.delta, report.epsilon)) in card
    )
    for name, value in of_ledger.rows().items():
        assert f"| {name} | {value} |" in card


@pytest.mark.slow
def test_it_goes_on_and_stops_where_the_budget_does(mine: Path) -> None:
    run = make(mine, privacy=BUDGET, save_strategy="steps", save_steps=2)
    first = sorted(mine.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))[0]
    run.train(resume_from_checkpoint=str(first))
    assert run.ledger.steps == load_report(mine).steps
    other = make(mine, privacy=BUDGET.replace(target_tpr=0.31), save_strategy="steps", save_steps=2)
    with pytest.raises(LedgerError, match=r"target_tpr: 0.3 in the ledger, 0.31 now"):
        other.train(resume_from_checkpoint=str(first))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([in_record(*place, "target_tpr", to=0.2) for place in EVERYWHERE], "budget: an attack finds 0.29"),
        ([in_record(*place, "at_fpr", to=0.2) for place in EVERYWHERE], "budget: an attack finds 0.4"),
        ([in_record("report", "target_tpr", to=0.4)], "target_tpr: 0.4 claimed, 0.3 follows"),
        ([in_record("config", "target_tpr", to=0.4)], "target_tpr: 0.4 claimed, 0.3 in the ledger's promise"),
    ],
)
@pytest.mark.slow
def test_what_is_changed_is_noticed(mine: Path, changes: list[Change], words: str) -> None:
    for change in changes:
        change(mine)
    seal(mine)
    assert words in failed(mine)


def test_a_changed_number_on_the_card_is_noticed(mine: Path) -> None:
    in_card(r"takes 1% of the others for used \| \d+\.\d+%", "takes 1% of the others for used | 1.01%")(mine)
    assert "card, text" in failed(mine)
    digest_anew(mine)
    assert "words of the card" in failed(mine)


@pytest.mark.parametrize(
    ("name", "value"), [("target_tpr", 0.05), ("target_tpr", "x"), ("at_fpr", 0), ("at_fpr", None)]
)
def test_what_is_no_budget_is_no_record(mine: Path, name: str, value: object) -> None:
    in_record("report", name, to=value)(mine)
    with pytest.raises(LedgerError, match=name):
        verify(mine)
