"""What a forger does to a record that tells of an earlier training: left out, made shorter, of others."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dp import PrivacyConfig
from hf_dp.accounting import Ledger, step_event
from hf_dp.hub import verify
from hf_dp.hub.card import privacy_section
from hf_dp.hub.record import PrivacyRecord, as_written
from tests.hub.forging import failed, in_record, seal
from tests.training.workbench import trained

pytestmark = pytest.mark.usefixtures("checked_once")
STEP = "training step"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps after three."""
    folder = tmp_path_factory.mktemp("after")
    privacy = PrivacyConfig(noise_multiplier=1.0, accountant="rdp")
    trained(folder / "one", privacy=privacy, max_steps=3).save_model()
    trained(folder / "two", privacy=privacy.replace(after=str(folder / "one")), max_steps=2).save_model()
    assert verify(folder / "two").private, failed(folder / "two")
    return folder / "two"


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def recomputed(record: PrivacyRecord, **changes: Any) -> PrivacyRecord:
    """With everything in its report that follows."""
    record = dataclasses.replace(record, **changes)
    return dataclasses.replace(record, report=record.mechanism.report(record.ledger, record.config))


def ledger_of(record: PrivacyRecord, times: dict[str, int]) -> Ledger:
    """With these charges changed."""
    ledger = Ledger(record.ledger.promise)
    for event, count, label in record.ledger.entries:
        if times.get(label, count):
            ledger.charge(event, label, times.get(label, count))
    return ledger


def forge(folder: Path, change: Callable[[PrivacyRecord], PrivacyRecord]) -> None:
    file = folder / "privacy.json"
    file.write_text(change(PrivacyRecord.from_json(file.read_text())).to_json())
    seal(folder)


@pytest.mark.slow
def test_an_earlier_training_is_not_left_out(copied: Path) -> None:
    own = {f"earlier 1, {STEP}": 0}
    forge(copied, lambda r: recomputed(r, ledger=ledger_of(r, own)))
    assert "what earlier trainings released: not what the ledger holds" in failed(copied)
    forge(copied, lambda r: recomputed(r, earlier=()))
    assert "earlier trainings: one in the mechanism, none in the record" in failed(copied)
    forge(copied, lambda r: recomputed(r, mechanism=dataclasses.replace(r.mechanism, earlier=())))
    assert "after: [] in the mechanism, ['one'] in the config" in failed(copied)
    in_record("config", "after", to=None)(copied)
    seal(copied)
    # Only where the ledger's promise forgets it as well, the claim is another one: of a training of its own.
    assert "earlier: 'nothing' claimed" in failed(copied)


def test_an_earlier_training_is_not_made_shorter(copied: Path) -> None:
    short = {f"earlier 1, {STEP}": 1}

    def shorter(record: PrivacyRecord) -> PrivacyRecord:
        (one,) = record.mechanism.earlier
        less = dataclasses.replace(one, releases=(dataclasses.replace(one.releases[0], times=1),))
        mechanism = dataclasses.replace(record.mechanism, earlier=(less,))
        return recomputed(record, ledger=ledger_of(record, short), mechanism=mechanism)

    forge(copied, shorter)
    assert "earlier trainings: one in the mechanism, one in the record that it holds" in failed(copied)
    file = copied / "privacy.json"
    values = json.loads(file.read_text())
    values["earlier"]["ledger"]["entries"][0]["count"] = 1
    file.write_text(json.dumps(values, indent=2))
    said = failed(copied)
    assert "claim of one: epsilon (RDP)" in said
    assert "earlier trainings" in said  # of another digest
    # Who makes all of the earlier record anew has another earlier training, and its digest shows it.
    earlier = PrivacyRecord.from_json(as_written(values["earlier"]))
    values["earlier"] = json.loads(recomputed(earlier).to_json())
    file.write_text(json.dumps(values, indent=2))
    assert "earlier trainings: one in the mechanism, one in the record" in failed(copied)
    assert "SHA-256 of its record" in next(c.found for c in verify(copied).checks if c.name == "claim of one")


@pytest.mark.parametrize(
    ("path", "to", "words"),
    [
        (("mechanism", "earlier", 0, "unit", "number"), 1000, "earlier trainings: "),
        (("mechanism", "earlier", 0, "record_sha256"), "0" * 64, "earlier trainings: "),
        (("mechanism", "earlier", 0, "epsilon"), 0.5, "earlier trainings: "),
        (("report", "earlier"), ["one: public data"], "claim and mechanism: earlier"),
        (("config", "other_people"), True, "other_people"),
        (("earlier", "config", "other_people"), True, "other people: a training after one with other_people=True"),
    ],
)
def test_what_is_said_of_it_follows_from_its_record(
    copied: Path, path: tuple[Any, ...], to: object, words: str
) -> None:
    in_record(*path, to=to)(copied)
    if path == ("config", "other_people"):
        in_record("config", "after", to=None)(copied)
    seal(copied)
    assert words in failed(copied)


@pytest.mark.parametrize(("mechanisms", "words"), [(6, "tight"), (7, "of so many mechanisms the RDP bound")])
@pytest.mark.slow
def test_a_card_calls_no_bound_of_so_many_mechanisms_tight(copied: Path, mechanisms: int, words: str) -> None:
    record = PrivacyRecord.from_json((copied / "privacy.json").read_text())
    many = Ledger()
    for i in range(mechanisms):
        many.charge(step_event(9.0 + i, 0.1))
    assert f"| epsilon, PLD accountant ({words}) |" in privacy_section(record.report, many, record.config)
