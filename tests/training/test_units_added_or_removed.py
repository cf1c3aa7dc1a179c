"""n as a secret, where n counts units: all rows of one more or less, and nothing that is seen follows from n."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dp import PrivacyConfig
from hf_dp.accounting import UncountedColumnExamplesUnit, UncountedColumnUnit, epsilon
from hf_dp.accounting.accountants import group_epsilon
from hf_dp.accounting.caveats import OWNERSHIP
from hf_dp.accounting.neighbours import ADD_OR_REMOVE
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import verify
from hf_dp.step.magnitudes import Magnitudes
from hf_dp.training.resuming.resume import examples_of
from tests.hub.forging import failed, in_record, seal
from tests.training.test_added_or_removed import GIVEN, OWN, RATE, drawn, kept, published
from tests.training.workbench import EXPECTED, STEPS, Trajectory, distance, make, private, rows

pytestmark = pytest.mark.usefixtures("checked_once")

# Three rows each, of which two are used; the last one is the one more.
USERS, MOST = 16, 2
OWNERS = [f"u{i // 3}" for i in range(3 * USERS)]
DATA = [{**row, "user": owner} for row, owner in zip(rows(), OWNERS, strict=True)]
BY_UNITS = {"unit": "user", "max_examples_per_unit": MOST}
APART = {**BY_UNITS, "unit_sampling": "examples"}


def trained(path: Path, users: int, privacy: PrivacyConfig, **changes: Any) -> tuple[Any, Trajectory]:
    """On the first so many users."""
    seen = Trajectory()
    trainer = make(
        path, privacy=privacy, parts={"train_dataset": DATA[: 3 * users], "callbacks": [seen]}, save_strategy="steps",
        save_steps=2, logging_steps=1, learning_rate=RATE, **changes,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer, seen


@pytest.mark.parametrize(
    ("way", "own"),
    [
        (BY_UNITS, OWN),
        (BY_UNITS, GIVEN),
        (APART, OWN),
        (APART, GIVEN),
    ],
    ids=["units, probability", "units, size", "examples, probability", "examples, size"],
)
@pytest.mark.slow
def test_of_two_datasets_that_differ_by_one_user_nothing_differs_but_the_sums(
    tmp_path: Path, way: dict[str, Any], own: dict[str, Any]
) -> None:
    config = private(withhold_non_private_logs=True, **way, **own)
    paths = [tmp_path / "one" / "out", tmp_path / "other" / "out"]
    (one, with_it), (other, without) = (trained(path, n, config) for path, n in zip(paths, (16, 15), strict=True))
    assert published(paths[0]) == published(paths[1])
    assert kept(paths[0]) == kept(paths[1])
    assert one._plan.mechanism == other._plan.mechanism
    assert str(one.privacy_report()) == str(other.privacy_report())
    assert (one.privacy_report().adjacency, one.privacy_report().dataset_size) == (ADD_OR_REMOVE, None)
    # What others do does not depend on whether the last user is there.
    others = other._plan.sampler.dataset_size
    assert others == (15 if way is BY_UNITS else 15 * MOST)
    assert [[i for i in batch if i < others] for batch in drawn(one)] == drawn(other)
    step, times = next(
        (step, len(own)) for step, batch in enumerate(drawn(one)) if (own := [i for i in batch if i >= others])
    )
    assert distance(with_it.points[step], without.points[step]) == 0
    moved = [with_it.points[step + 1][name] - without.points[step + 1][name] for name in with_it.points[0]]
    norm = math.sqrt(sum(float(part.square().sum()) for part in moved)) * EXPECTED / RATE
    assert 0 < norm <= times * (1 + 1e-3)


def test_which_rows_of_a_user_are_chosen_is_drawn_from_the_secret_of_the_run(tmp_path: Path) -> None:
    """By the places of rows it would follow from n, where a public seed has shuffled them; see `units/test_rows.py`."""

    def chosen(**changes: Any) -> list[int]:
        trainer = make(tmp_path, privacy=private(**APART, **changes), parts={"train_dataset": keyed})
        return [row["input_ids"][0] for row in trainer._planned()[1].dataset.dataset]

    keyed = [{**row, "input_ids": [i]} for i, row in enumerate(DATA)]
    secret = [chosen(seed=None, **GIVEN) for _ in range(2)]
    for one in secret:
        assert {i // 3 for i in one} == set(range(USERS))
        assert len(one) == MOST * USERS
    assert secret[0] != secret[1]  # alike once in 3^16
    assert chosen(**GIVEN) == chosen(**GIVEN) != secret[0]
    # Negative control: where whose each row is is public, so is the choice.
    assert chosen(seed=None) == chosen(seed=None)


def test_delta_is_held_against_the_number_of_users_and_not_of_examples(tmp_path: Path) -> None:
    promise = {**APART, "sampling_probability": 0.2}
    make(
        tmp_path, privacy=private(**promise, target_delta=1 / (USERS + 0.5)), parts={"train_dataset": DATA}
    )._planned()  # not below 1 over the examples
    with pytest.raises(ConfigurationError, match=rf"for a dataset of {USERS} units \(1/n is 0.0625"):
        make(tmp_path, privacy=private(**promise, target_delta=1 / USERS), parts={"train_dataset": DATA})
    with pytest.raises(ConfigurationError, match="for a dataset of 40 chosen examples"):
        make(tmp_path, privacy=private(**APART, **GIVEN, target_delta=1 / 40), parts={"train_dataset": DATA})


@pytest.mark.parametrize(("way", "of"), [(BY_UNITS, "16 units"), (APART, "32 chosen examples"), ({}, "48 examples")])
def test_batches_far_off_are_told_in_what_is_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: dict[str, Any], of: str
) -> None:
    plan, _ = make(
        tmp_path, privacy=private(**way, sampling_probability=1.0, target_delta=1e-5), parts={"train_dataset": DATA}
    )._planned()
    Magnitudes(plan, torch.nn.Linear(2, 2))
    assert f"of the {of} in a step" in caplog.text


@pytest.mark.slow
def test_a_single_user_needs_two_different_rows(tmp_path: Path) -> None:
    config = private(**BY_UNITS, sampling_probability=0.5, target_delta=0.4)
    for n, refused in ((1, True), (3, False)):
        trainer = make(tmp_path / str(n), privacy=config, parts={"train_dataset": DATA[:n]}, max_steps=1)
        with (
            pytest.raises(ConfigurationError, match="one by itself cannot be trained on") if refused else nullcontext()
        ):
            trainer.train()
        assert trainer.ledger.steps == (not refused)


def test_a_second_training_on_other_users_is_refused_in_words_without_their_number() -> None:
    promises = [
        {"dataset_size": None, "unit": "user", "max_examples_per_unit": MOST, "unit_sampling": "examples"},
        {"dataset_size": 5, "unit": "user", "max_examples_per_unit": MOST},
        {"dataset_size": None},
    ]
    assert [examples_of(promise) for promise in promises] == [
        "units whose number is secret (column user, at most 2 examples of each, each drawn by itself)",
        "5 units (column user, at most 2 examples of each)",
        "examples whose number is secret",
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("secret") / "out"
    trainer, _ = trained(path, USERS, PrivacyConfig(target_epsilon=8.0, **APART, **GIVEN))
    return path, trainer


@pytest.mark.slow
def test_the_record_says_so_and_verifies(saved: tuple[Path, Any]) -> None:
    path, trainer = saved
    report, ledger = trainer.privacy_report(), trainer.ledger
    assert (report.dataset_size, report.drawn_from, report.sampling_probability) == (None, None, EXPECTED / 40)
    assert report.delta == 40**-1.1
    assert OWNERSHIP not in report.caveats
    assert trainer._plan.mechanism.unit == UncountedColumnExamplesUnit(column="user", max_examples=MOST)
    by_example = trainer._plan.sampler.terms.event(trainer._plan.mechanism.noise.event(), UncountedColumnUnit(
        column="user", max_examples=MOST
    ))  # fmt: skip
    assert epsilon(ledger.event, report.delta) == pytest.approx(
        group_epsilon(type(ledger.event)([by_example] * STEPS), report.delta, MOST), rel=1e-9
    )
    found = verify(path)
    assert found.private, [check for check in found.checks if not check.passed]
    card = (path / "README.md").read_text()
    for words in (
        'in the sense of "add or remove one, n secret". ',
        "Had those with any single value of 'user' not been in the data",
        "| number of units | secret; 40 stands for that of the examples that are drawn from |",
        "Poisson: each example with probability 0.2 in each step, sums divided by 8",
        "not offered for mixtures of Gaussians",
    ):
        assert words in card


@pytest.mark.parametrize(
    "changes",
    [
        [in_record("config", "dataset_size", to=None)],
        [in_record("mechanism", "unit", "kind", to="uncounted column")],
        [
            in_record("mechanism", "unit", "max_examples", to=1),
            in_record("config", "max_examples_per_unit", to=1),
            in_record("ledger", "promise", "max_examples_per_unit", to=1),
        ],
    ],
    ids=["public", "other unit", "fewer rows"],
)
@pytest.mark.slow
def test_a_forged_record_fails(saved: tuple[Path, Any], tmp_path: Path, changes: list[Any]) -> None:
    forged = Path(shutil.copytree(saved[0], tmp_path / "forged"))
    for change in changes:
        change(forged)
    seal(forged)
    assert failed(forged)


@pytest.mark.slow
def test_it_resumes_as_it_was_promised_and_no_other_way(saved: tuple[Path, Any], tmp_path: Path) -> None:
    here = Path(shutil.copytree(saved[0], tmp_path / "out"))

    def resumed(**changes: Any) -> Any:
        privacy = PrivacyConfig(target_epsilon=8.0, **{**APART, **GIVEN, **changes})
        trainer = make(here, privacy=privacy, parts={"train_dataset": DATA}, learning_rate=RATE)
        trainer.train(resume_from_checkpoint=str(here / "checkpoint-2"))
        return trainer

    assert resumed().ledger.steps == STEPS
    for changes in ({"dataset_size": 41}, {"dataset_size": None}, {"unit_sampling": "units"}):
        with pytest.raises(LedgerError):
            resumed(**changes)


def test_users_who_share_rows_have_no_such_claim(tmp_path: Path) -> None:
    """Without one of them another row of the other would be chosen."""
    shared = [{**row, "user": [row["user"], "u0"][: 1 + i % 2]} for i, row in enumerate(DATA)]
    with pytest.raises(ConfigurationError, match="of several units .*, whose number is secret"):
        make(tmp_path, privacy=private(**APART, **GIVEN), parts={"train_dataset": shared})
    assert json.loads(private(**APART, **GIVEN).to_json())["dataset_size"] == 40
