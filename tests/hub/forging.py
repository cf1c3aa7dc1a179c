"""What a forger does to a saved model, and what `verify` says to it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import hf_dp.hub.card
from hf_dp.accounting import Ledger
from hf_dp.cli import app
from hf_dp.hub import verify, write_card
from hf_dp.hub.record import PrivacyRecord


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def in_record(*path: Any, to: Any) -> Callable[[Path], None]:
    """Changes a value of privacy.json; `to` may be a function of the old one."""

    def change(directory: Path) -> None:
        file = directory / "privacy.json"
        values = json.loads(file.read_text())
        place = values
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = to(place[path[-1]]) if callable(to) else to
        file.write_text(json.dumps(values, indent=2))

    return change


def seal(directory: Path) -> None:
    """What a careful forger does next: a card that fits privacy.json again."""
    write_card(directory)
    digest_anew(directory)
    write_card(directory)


def digest_anew(directory: Path) -> None:
    text = (directory / "README.md").read_text()
    section = text[text.index(hf_dp.hub.card.BEGIN) : text.index(hf_dp.hub.card.END) + len(hf_dp.hub.card.END)]
    in_record("card_sha256", to=hf_dp.hub.record.sha256_of_text(section))(directory)


def in_card(old: str, new: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        text = (directory / "README.md").read_text()
        assert re.search(old, text)
        (directory / "README.md").write_text(re.sub(old, new, text, count=1))

    return change


def in_weights(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = next(iter(tensors))
    tensors[name] = np.nextafter(tensors[name], np.float32(1))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def failed(directory: Path | str) -> str:
    return " | ".join(f"{check.name}: {check.found}" for check in verify(directory).checks if not check.passed)


def forged(directory: Path, charges: list[tuple[Any, int]], **report: Any) -> None:
    """A record with another ledger, and with everything that follows from it."""
    file = directory / "privacy.json"
    record = PrivacyRecord.from_json(file.read_text())
    ledger = Ledger()
    ledger.promise = record.ledger.promise
    for event, count in charges:
        ledger.charge(event, count=count)
    epsilons = {
        "epsilon": ledger.epsilon(record.report.delta),
        "epsilon_rdp": ledger.epsilon(record.report.delta, "rdp"),
    }
    changed = dataclasses.replace(record.report, **epsilons, **report)
    file.write_text(dataclasses.replace(record, report=changed, ledger=ledger).to_json())
    seal(directory)


def in_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Changes the card."""

    def apply(directory: Path) -> None:
        card = directory / "README.md"
        card.write_text(change(card.read_text()))

    return apply
