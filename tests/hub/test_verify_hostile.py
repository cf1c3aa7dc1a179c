"""Files that are made to mislead `verify`, or to keep it busy: a refusal or a failed check, and soon."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from hf_dp.accounting import epsilon, step_event
from hf_dp.errors import LedgerError
from hf_dp.hub import load_report, verify
from hf_dp.hub.card import BEGIN, END
from tests.hub.forging import failed, in_card, in_record, in_text, invoke, seal

pytestmark = pytest.mark.usefixtures("checked_once")

BILLION_LAUGHS = "a0: &a0 [lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
EVENT = {"type": "poisson_sampled", "sampling_probability": 0.1}


def many_mechanisms(directory: Path, n: int = 2000) -> None:
    entries = [
        {
            "event": {**EVENT, "event": {"type": "gaussian", "noise_multiplier": 1 + i / n}},
            "count": 1,
            "label": "training step",
        }
        for i in range(n)
    ]
    in_record("ledger", "entries", to=entries)(directory)


def many_names(directory: Path, n: int) -> None:
    in_record("files", to=lambda files: {**files, **{f"m{i}.json": "0" * 64 for i in range(n)}})(directory)


def deep_event(n: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        for _ in range(n):
            event = {"type": "self_composed", "count": 1, "event": event}
        return event

    return change


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: many_mechanisms(d), "2000 different mechanisms"),
        (lambda d: many_names(d, 200_000), "bytes, and no record has more"),
        (lambda d: many_names(d, 5000), "files, and no model has more"),
        (in_record("config", to=lambda config: {**config, "x" * 900_000: 1}), "config is not a promise"),
        (in_record("ledger", "entries", 0, "event", to=deep_event(400)), "nested deeper than 100"),
        (in_record("config", to=lambda config: {**config, "x": json.loads("[" * 300 + "]" * 300)}), "nested deeper"),
        (in_record("report", "unit", to="\ud800"), "half a character"),
        (in_record("report", "unit", to="one\x1b[2Jexample"), "control characters"),
        (in_record("files", to={"a\x00.json": "0" * 64}), "control characters"),
        (in_record("ledger", "entries", 0, "label", to="step\ud800"), "half a character"),
    ],
)
def test_a_record_beyond_all_measure_is_refused_on_one_screen(
    copy: Path, change: Callable[[Path], None], words: str
) -> None:
    change(copy)
    with pytest.raises(LedgerError, match=words):
        verify(copy)
    said = invoke("verify", str(copy))
    assert (said.exit_code, said.stdout) == (2, "")
    assert len(said.stderr) < 6000


@pytest.mark.parametrize(
    "change",
    [
        in_text(lambda text: text.replace("---\n", f"---\n{BILLION_LAUGHS}", 1)),
        in_card("differential_privacy:", "x: &x [1]\ny: &y [*x]\ndifferential_privacy:"),
        in_card("differential_privacy:", "x: &x [*x]\ndifferential_privacy:"),
        in_text(lambda text: text.replace("---\n", f"---\nx: &x 1\ny: [{'*x, ' * 1000}]\n", 1)),
        in_text(lambda text: text.replace("---\n", "---\nx: " + "[" * 200_000 + "\n", 1)),
        in_card(r"epsilon_pld: .*", "epsilon_pld: " + "1:" * 120_000 + "1"),
        in_text(lambda text: text.replace("---\n", "---\nx: [" + "a, " * 200_000 + "]\n", 1)),
        in_text(lambda text: text + BEGIN * 30_000),
        in_text(lambda text: text + f"{END}\n{BEGIN}\n" * 15_000),
        in_text(lambda text: text + "[" * 900_000),
        in_text(lambda text: f"{text}\n\n<div {'[^' * 9000}{'@' * 9000}{'<a ' * 9000}"),
        in_text(lambda text: f"{text}\n\n$$ {'%' * 27000}\\a{' ' * 27000}$$ <style>"),
        in_text(lambda text: text + "x" * (1 << 21)),
    ],
    ids=[
        "laughs",
        "alias in an alias",
        "alias of itself",
        "aliases",
        "deep",
        "sexagesimal",
        "long",
        "markers",
        "crossed markers",
        "brackets",
        "tags",
        "formulas",
        "bytes",
    ],
)
def test_a_card_beyond_all_measure_is_a_failed_check(copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    assert failed(copy).startswith("card")


def test_many_mechanisms_are_added_up_by_the_faster_accountant() -> None:
    event = dp.ComposedDpEvent([dp.SelfComposedDpEvent(step_event(1 + i / 8, 0.1), 2) for i in range(7)])
    assert epsilon(event, 1e-5) == epsilon(event, 1e-5, "rdp")


def test_what_is_no_file_is_not_read(copy: Path) -> None:
    for name in ("README.md", "privacy.json"):
        (copy / name).unlink()
        os.mkfifo(copy / name)
        with pytest.raises(LedgerError, match=f"{name} in .* is no file"):
            verify(copy)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings in one ledger, the second with larger batches, under a given noise."""
    from hf_dp import PrivacyConfig
    from tests.training.workbench import make

    path = tmp_path_factory.mktemp("staged") / "out"
    run = make(path, privacy=PrivacyConfig(noise_multiplier=1.5), max_steps=2)
    run.train()
    run._expected_batch_size = 12
    run.train()
    run.save_model()
    assert len(run.ledger.entries) == 2
    return path


def refreshed(directory: Path) -> None:
    """Epsilon, the card and all digests anew, as a forger would who can compute."""
    from hf_dp.hub.record import PrivacyRecord
    from tests.hub.forging import forged

    record = PrivacyRecord.from_json((directory / "privacy.json").read_text())
    forged(directory, [(event, count) for event, count, _ in record.ledger.entries], steps=record.ledger.steps)


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        (0, {"noise_multiplier": 12.0}),
        (1, {"noise_multiplier": 12.0}),
        (0, {"sampling_probability": 0.0}),
        (0, {"sampling_probability": 1e-6}),
        (0, {"sampling_probability": 0.99 / 48}),
        (1, {"sampling_probability": 1 / 48}),
    ],
)
@pytest.mark.slow
def test_each_stage_has_the_noise_of_the_promise(
    staged: Path, tmp_path: Path, entry: int, change: dict[str, Any]
) -> None:
    copy = Path(shutil.copytree(staged, tmp_path / "copy"))
    assert verify(copy).private, failed(copy)
    values = json.loads((copy / "privacy.json").read_text())
    event = values["ledger"]["entries"][entry]["event"]
    for name, value in change.items():
        (event["event"] if name in event["event"] else event)[name] = value
    (copy / "privacy.json").write_text(json.dumps(values))
    refreshed(copy)
    assert "noise of the steps" in failed(copy) or "sampling probability" in failed(copy)
    assert "epsilon" not in failed(copy), "the forger's epsilon follows from the ledger"


def test_the_noise_that_a_config_gives_is_that_of_the_claim(staged: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(staged, tmp_path / "copy"))
    in_record("config", "noise_multiplier", to=3.0)(copy)
    in_record("ledger", "promise", "noise_multiplier", to=3.0)(copy)
    seal(copy)
    assert "noise_multiplier: 1.5 in the mechanism, 3.0 in the config" in failed(copy)


def test_a_report_reads_what_a_forger_wrote_without_being_kept_busy(copy: Path) -> None:
    many_mechanisms(copy)
    assert load_report(copy).steps == 4


@pytest.mark.parametrize("change", [in_record("report", "caveats", 0, to=1), in_record("report", "unit", to=[1])])
def test_what_is_no_text_is_not_printed_as_one(copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    for command in ("report", "verify"):
        said = invoke(command, str(copy))
        assert said.exit_code == 2, said.exception
        assert "is no text" in said.stderr
