"""Records of add-or-remove, where n is secret, and of zero-out: neither passes for the other."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dp import PrivacyConfig
from hf_dp.accounting.neighbours import ADD_OR_REMOVE, SAID_BEFORE, ZERO_OUT
from hf_dp.errors import ConfigurationError, LedgerError
from hf_dp.hub import load_report, verify
from tests.hub.forging import failed, in_record, invoke, seal
from tests.training.workbench import make, saved_by

pytestmark = pytest.mark.usefixtures("checked_once")

Change = Callable[[Path], None]
Q, UNCOUNTED = 0.2, {"kind": "uncounted example"}
# The ledger's promise and the report of a record of zero-out, as if n had not been in it.
HIDDEN: list[Change] = [
    in_record("report", "adjacency", to=ADD_OR_REMOVE),
    in_record("report", "dataset_size", to=None),
    in_record("ledger", "promise", "dataset_size", to=None),
    in_record("mechanism", "unit", to=UNCOUNTED),
]
COUNTED: list[Change] = [
    in_record("report", "adjacency", to=ZERO_OUT),
    in_record("report", "dataset_size", to=40),  # of which q draws the expected batch
    in_record("ledger", "promise", "dataset_size", to=40),
    in_record("mechanism", "unit", to={"kind": "example", "number": 40}),
]


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose record has no n."""
    path = tmp_path_factory.mktemp("secret") / "out"
    config = PrivacyConfig(target_epsilon=3.0, target_delta=1e-5, accountant="rdp", sampling_probability=Q)
    return saved_by(path, privacy=config)


@pytest.fixture
def mine(secret: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(secret, tmp_path / "mine"))


@pytest.mark.slow
def test_it_is_verified_and_told_without_n(secret: Path) -> None:
    found = {check.name: check.found for check in verify(secret).checks if check.passed}
    assert found["neighbouring datasets"] == ADD_OR_REMOVE == "add or remove one, n secret"
    assert found["delta"] == "1e-05, a number of its own: 1/n is secret, as n is, and at most 0.5"
    assert found["sampling probability"] == "0.2 whatever n is, charged with 0.2"
    assert verify(secret).private
    said = invoke("verify", str(secret))
    assert (said.exit_code, "How many examples there are is secret" in " ".join(said.stdout.split())) == (0, True)
    told = invoke("report", str(secret))
    assert "sums divided by 8" in told.stdout
    assert '"dataset_size": null' in invoke("report", str(secret), "--json").stdout
    assert load_report(secret).adjacency == ADD_OR_REMOVE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (COUNTED, f"neighbouring datasets: {ZERO_OUT} in the mechanism, {ADD_OR_REMOVE} follows from the config"),
        (
            [in_record("report", "sampling_probability", to=0.1)],
            "sampling probability: 0.2 whatever n is, charged with 0.2",
        ),
        ([in_record("config", "sampling_probability", to=0.1)], "sampling probability: 0.1 whatever n is"),
        ([in_record("config", "sampling_probability", to=None)], "follows from the config"),
        ([in_record("mechanism", "sampling", "probability", to=0.1)], "sampling: {'probability': 0.1,"),
        ([in_record("ledger", "promise", "sampling_probability", to=0.1)], "in the ledger's promise"),
        ([in_record("report", "delta", to=0.5)], "delta: 0.5, a number of its own"),
        ([in_record("ledger", "promise", "dataset_size", to=48)], "dataset_size: None claimed, 48 in the ledger's"),
    ],
)
@pytest.mark.slow
def test_what_is_changed_is_noticed(mine: Path, changes: list[Change], words: str) -> None:
    for change in changes:
        change(mine)
    seal(mine)
    assert words in failed(mine)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            in_record("report", "dataset_size", to=48),
            "dataset_size is 48, for neighbours 'add or remove one, n sec",
        ),
        (in_record("report", "adjacency", to=ZERO_OUT), "dataset_size is None, for neighbours 'replace one by nothing"),
        (in_record("report", "adjacency", to=SAID_BEFORE), "dataset_size is None, for neighbours 'add or remove one'"),
        (
            in_record("mechanism", "unit", to={**UNCOUNTED, "number": 48}),
            "'number': 48} in the terms",
        ),
        (in_record("config", "target_delta", to=None), "without target_delta"),
        (in_record("config", "sampling_probability", to=2), "sampling_probability=2"),
    ],
)
def test_what_contradicts_itself_is_no_record(mine: Path, change: Change, words: str) -> None:
    change(mine)
    with pytest.raises(LedgerError, match=words.replace("(", "\\(")):
        verify(mine)


def test_zero_out_does_not_pass_for_add_or_remove(copy: Path) -> None:
    """Of n = 48 examples, from which q = 8 / 48 follows."""
    for change in HIDDEN:
        change(copy)
    seal(copy)
    said = failed(copy)
    assert f"neighbouring datasets: {ADD_OR_REMOVE} in the mechanism, {ZERO_OUT} follows from the config" in said


def test_the_first_records_words_are_not_these(copy: Path) -> None:
    in_record("report", "adjacency", to=SAID_BEFORE)(copy)
    seal(copy)
    assert f"neighbouring datasets: {SAID_BEFORE} claimed, {ZERO_OUT} follows" in failed(copy)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of whose n a number of its own took the place."""
    path = tmp_path_factory.mktemp("given") / "out"
    return saved_by(path, privacy=PrivacyConfig(target_epsilon=3.0, accountant="rdp", dataset_size=40))


@pytest.mark.slow
def test_a_number_in_place_of_n_is_verified_and_told(given: Path) -> None:
    found = {check.name: check.found for check in verify(given).checks if check.passed}
    assert found["neighbouring datasets"] == ADD_OR_REMOVE
    assert found["delta"] == f"{40**-1.1:.3g} is below 1/n = 0.025"
    assert found["sampling probability"] == "expected batch 8 of 40, which stands for n, charged with 0.2"
    assert verify(given).private
    card, record = (given / "README.md").read_text(), (given / "privacy.json").read_text()
    assert "| number of units | secret; 40 stands for it |" in card
    assert "48" not in re.findall(r"\b\d+\b", card.partition("How to verify")[0] + record)


PLACES: list[Change] = [
    in_record("config", "dataset_size", to=400), in_record("ledger", "promise", "given_dataset_size", to=400)
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (PLACES[:1], "given_dataset_size: 400 claimed, 40 in the ledger's promise"),
        (PLACES, "sampling: {'probability': 0.2, 'expected_batch_size': 8, 'kind': 'poisson'} in the mechanism"),
        ([in_record("report", "sampling_probability", to=0.1)], "expected batch 8 of 40, which stands for n, charged"),
        ([in_record("report", "delta", to=0.03)], "delta: delta=0.03 for a dataset of 40"),
        ([in_record("config", "dataset_size", to=None)], "follows from the config"),
    ],
)
@pytest.mark.slow
def test_what_is_changed_of_that_is_noticed(given: Path, tmp_path: Path, changes: list[Change], words: str) -> None:
    mine = Path(shutil.copytree(given, tmp_path / "mine"))
    for change in changes:
        change(mine)
    seal(mine)
    assert words in failed(mine)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dataset_size": 1}, "dataset_size=1."),
        ({"dataset_size": 40.0}, "dataset_size=40.0."),
        ({"dataset_size": 40, "sampling_probability": 0.2}, "dataset_size=40 with sampling_probability=0.2"),
        ({"dataset_size": 40, "max_batch_size": 9}, "dataset_size=40 with max_batch_size=9"),
    ],
)
def test_a_number_that_does_not_stand_for_n_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        PrivacyConfig(target_epsilon=3.0, **values)
    assert words in str(refusal.value)


def test_delta_is_below_one_over_both_and_epochs_are_refused(tmp_path: Path) -> None:
    """There are 48 examples: a delta for fewer of them would be too large."""
    own = PrivacyConfig(target_epsilon=3.0, dataset_size=20, target_delta=0.03)
    with pytest.raises(ConfigurationError, match="delta=0.03 for a dataset of 48"):
        make(tmp_path, privacy=own)
    with pytest.raises(ConfigurationError, match="no max_steps, with dataset_size=40"):
        make(tmp_path, privacy=own.replace(dataset_size=40, target_delta=None), max_steps=-1, num_train_epochs=2)
    with pytest.raises(ConfigurationError, match="dataset_size=6, and an expected batch of 8"):
        make(tmp_path, privacy=own.replace(dataset_size=6, target_delta=None))
