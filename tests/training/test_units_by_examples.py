"""Units whose examples are drawn each by itself: the training by examples on those chosen, charged for whole units."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
from datasets import Dataset

from hf_dp import PrivacyConfig
from hf_dp.accounting import ColumnExamplesUnit, Ledger, PoissonSampling, epsilon
from hf_dp.accounting.accountants import group_epsilon
from hf_dp.accounting.caveats import OWNERSHIP
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import verify
from hf_dp.hub.charged import charged_with, steps_are
from hf_dp.units.rows import UnitRows
from tests.hub.forging import failed, in_record, seal
from tests.training.test_units import OWNERS, keep_all, owned
from tests.training.workbench import EXPECTED, Rows, make, parameters, private, rows, same

pytestmark = pytest.mark.usefixtures("checked_once")

MOST = 2
# Rows of one, of two and of three; nobody has more than MOST of those that are chosen.
SHARED = [[owner, *(f"u{(i + j) % 11}" for j in range(i % 3))] for i, owner in enumerate(OWNERS)]


def apart(**changes: Any) -> PrivacyConfig:
    return private(**{"unit": "user", "max_examples_per_unit": MOST, "unit_sampling": "examples", **changes})


@pytest.mark.parametrize("owners", [OWNERS, SHARED], ids=["of one", "of several"])
@pytest.mark.slow
def test_it_is_the_training_by_examples_on_the_rows_that_are_chosen(tmp_path: Path, owners: list[Any]) -> None:
    units = UnitRows(owners, "user", MOST, several=True)
    chosen = units.chosen()
    assert EXPECTED < len(chosen) < len(owners)
    found = {}
    data: dict[str, Any] = {"apart": Dataset.from_list(owned(owners)) if owners is OWNERS else owned(owners)}
    data["rows"] = [rows()[row] for row in chosen]
    for name, privacy in (("apart", apart()), ("rows", private())):
        trainer = make(tmp_path / name, privacy=privacy, parts={"train_dataset": data[name]})
        trainer.train()
        found[name] = parameters(trainer.model), trainer
    assert same(found["apart"][0], found["rows"][0])
    # Its users are told what a person with so many rows is told there.
    report, by_rows = (found[name][1].privacy_report() for name in ("apart", "rows"))
    assert (report.dataset_size, report.drawn_from) == (len(units), len(chosen))
    assert report.delta == pytest.approx(len(units) ** -1.1)
    cost = group_epsilon(found["rows"][1].ledger.event, report.delta, MOST)
    assert report.epsilon == pytest.approx(cost, rel=1e-9)
    assert report.epsilon > epsilon(found["rows"][1].ledger.event, report.delta) > 0
    assert (OWNERSHIP in report.caveats, OWNERSHIP in by_rows.caveats) == (True, False)


def test_of_one_example_each_it_costs_what_examples_cost(tmp_path: Path) -> None:
    plans = [
        make(tmp_path, privacy=privacy, parts={"train_dataset": owned(list(range(48)))})._planned()[0]
        for privacy in (
            apart(noise_multiplier=None, target_epsilon=3.0, max_examples_per_unit=1),
            private(noise_multiplier=None, target_epsilon=3.0),
        )
    ]
    assert plans[0].noise_multiplier == plans[1].noise_multiplier
    assert plans[0].event == plans[1].event


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apart") / "out"
    trainer = make(
        path, privacy=apart(noise_multiplier=None, target_epsilon=8.0, seed=None),
        parts={"train_dataset": owned(SHARED), "data_collator": keep_all}, remove_unused_columns=False,
        max_steps=3, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return path


@pytest.mark.slow
def test_what_is_published_is_verified_and_says_whom_it_protects(saved: Path) -> None:
    found = verify(saved)
    assert found.private, [check for check in found.checks if not check.passed]
    card, record = (saved / "README.md").read_text(), json.loads((saved / "privacy.json").read_text())
    number, drawn = record["report"]["dataset_size"], record["report"]["drawn_from"]
    assert record["mechanism"]["unit"]["examples"] == record["ledger"]["promise"]["drawn_from"] == drawn
    for words in (
        f"at most {MOST} of them among the {drawn} that are drawn from",
        "n and whose each example is public",
        f"| number of units | {number} |",
        f"each of {drawn} examples with probability {EXPECTED / drawn:.4g} in each step, {EXPECTED} on average",
        "(a mixture of Gaussians)",
        OWNERSHIP,
    ):
        assert words in card


def one_row_less(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "max_examples": MOST - 1}


@pytest.mark.parametrize(
    "changes",
    [
        [in_record("config", "unit_sampling", to="units")],
        [
            in_record("config", "max_examples_per_unit", to=MOST - 1),
            in_record("mechanism", "unit", to=one_row_less),
            in_record("ledger", "promise", "max_examples_per_unit", to=MOST - 1),
        ],
        [in_record("report", "drawn_from", to=None)],
        [in_record("report", "drawn_from", to=40), in_record("ledger", "promise", "drawn_from", to=40)],
        [in_record("report", "caveats", to=lambda said: said[1:])],
    ],
    ids=["sampling", "fewer rows", "no rows", "other rows", "whose is not said"],
)
@pytest.mark.slow
def test_a_forged_record_fails(saved: Path, tmp_path: Path, changes: list[Any]) -> None:
    forged = Path(shutil.copytree(saved, tmp_path / "forged"))
    for change in changes:
        change(forged)
    seal(forged)
    assert failed(forged)


@pytest.mark.slow
def test_it_resumes_under_the_same_promise_alone(saved: Path, tmp_path: Path) -> None:
    here = Path(shutil.copytree(saved, tmp_path / "out"))
    promise = {"noise_multiplier": None, "target_epsilon": 8.0, "seed": None}

    def resumed(privacy: PrivacyConfig, data: Rows) -> Any:
        trainer = make(
            here, privacy=privacy, parts={"train_dataset": data, "data_collator": keep_all},
            remove_unused_columns=False, max_steps=3, save_strategy="no",
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(here / "checkpoint-2"))
        return trainer

    assert resumed(apart(**promise), owned(SHARED)).ledger.steps == 3
    with pytest.raises(LedgerError, match="max_examples_per_unit"):
        resumed(apart(**promise, max_examples_per_unit=3), owned(SHARED))
    others = [[*SHARED[0], "u9"], *SHARED[1:]]
    with pytest.raises(LedgerError, match="not the data that the checkpoint was trained on|belongs to another run"):
        resumed(apart(**promise), owned(others))


def test_earlier_steps_of_a_ledger_may_have_had_another_whole_batch_and_no_other_noise() -> None:
    unit = ColumnExamplesUnit(number=20, column="user", max_examples=3, examples=35)

    def charged(expected: float, noise: float = 1.0) -> Any:
        sampling = PoissonSampling(probability=expected / 35, expected_batch_size=expected)
        return sampling, sampling.event(dp.GaussianDpEvent(noise), unit)

    last, event = charged(8)
    for earlier, one_stage, agrees in (
        (charged(8), True, True), (charged(5), False, True), (charged(5), True, False), (charged(5.5), False, False),
        (charged(5, 0.9), False, False),
    ):  # fmt: skip
        ledger = Ledger()
        ledger.charge(earlier[1])
        ledger.charge(event)
        assert steps_are(Ledger.from_dict(ledger.to_dict()), last, 1.0, unit, 35, one_stage=one_stage) == agrees
    assert charged_with(event, math.nan) == pytest.approx(8 / 35, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "data", "found"),
    [
        (
            {"max_examples_per_unit": 1},
            owned(["a"] * 40 + ["b"] * 8),
            "of 8 from a training dataset of 2 chosen exampl",
        ),
        ({"target_delta": 0.3}, owned(), r"delta=0.3 for a dataset of \d\d units"),
        ({}, owned(["a", *[[]] * 47]), r"row 1 \(counted from 0\) of the training data has \[\]"),
        ({"unit_sampling": "units"}, owned(SHARED), "a row of several units is none's alone"),
    ],
)
def test_what_cannot_be_is_refused_when_the_trainer_is_made(
    tmp_path: Path, change: dict[str, Any], data: Rows, found: str
) -> None:
    with pytest.raises(ConfigurationError, match=found):
        make(tmp_path, privacy=apart(**change), parts={"train_dataset": data})
