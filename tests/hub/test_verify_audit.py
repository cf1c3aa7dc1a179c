"""An audit beside a claim: recomputed from its counts, shown; one that is forged, or of something else, is told of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_dp.audit import OneRun
from hf_dp.audit.outcome import Audit
from hf_dp.errors import LedgerError
from hf_dp.hub import add_audit, verify
from hf_dp.hub.card import BEGIN, END, without_audit
from hf_dp.hub.card_file import write_card
from hf_dp.hub.record import PrivacyRecord, sha256_of_record, sha256_of_text
from tests.hub.forging import failed, in_card, in_record, invoke, seal


def delta_of(folder: Path) -> float:
    return PrivacyRecord.from_json((folder / "privacy.json").read_bytes()).report.delta


def found(right: int, folder: Path, **changes: Any) -> OneRun:
    """So many of 24 guesses about 30 canaries; at so large a delta only much confidence in little says anything."""
    values = {"confidence": 0.8, "canaries": 30, "guesses": 24, "tried": 1, **changes}
    return OneRun(epsilon=0.0, delta=delta_of(folder), right=right, **values).again()


def test_an_audit_stands_in_record_and_card_and_changes_no_promise(copy: Path) -> None:
    before = (copy / "privacy.json").read_bytes()
    audit = Audit(attacks={"loss": found(20, copy), "gradient": found(24, copy)})
    add_audit(copy, audit)
    after = (copy / "privacy.json").read_bytes()
    one, two = map(PrivacyRecord.from_json, (before, after))
    assert two.audit == audit
    assert audit.confidence == pytest.approx(0.6)
    assert audit.best == "gradient"
    assert audit.epsilon > 0.5
    assert dataclasses.replace(two, audit=None) == one
    assert sha256_of_record(after) == sha256_of_record(before) != sha256_of_record(b"{}")
    checked = verify(copy)
    assert checked.private, failed(copy)
    assert any("guesses about 30 canaries" in note and "A low bound says nothing" in note for note in checked.notes)
    assert "**Audited.** An attack (" in (copy / "README.md").read_text()
    in_card("says nothing", "says that all is well")(copy)
    assert "card, text: the privacy section is changed or missing" in failed(copy)
    told = invoke("report", str(copy)).output
    assert "Audited: An attack (" in told
    add_audit(copy, audit)
    assert (copy / "privacy.json").read_bytes() == after


def test_nothing_else_is_said_of_an_audit_in_the_words_of_another_version(copy: Path) -> None:
    audit = Audit(attacks={"loss": found(20, copy)})
    add_audit(copy, audit)
    card = (copy / "README.md").read_text()
    section = card[card.index(BEGIN) : card.index(END) + len(END)]
    in_record("report", "versions", "hf_dp", to="0.0.1")(copy)
    in_record("card_sha256", to=sha256_of_text(without_audit(section, audit)))(copy)
    write_card(copy)
    assert "card, text" not in failed(copy)
    in_card("says nothing", "says that all is well")(copy)
    assert "card, text: the privacy section is changed or missing" in failed(copy)


def test_a_bound_above_the_claim_is_written_and_verify_says_so(copy: Path) -> None:
    loud = found(40, copy, confidence=0.51, canaries=40, guesses=40)
    assert loud.epsilon > json.loads((copy / "privacy.json").read_text())["report"]["epsilon"]
    add_audit(copy, Audit(attacks={"loss": loud}))
    assert failed(copy).startswith("audit and claim: epsilon is at least")
    assert not verify(copy).private


FORGED: list[tuple[str, Any, str]] = [
    ("epsilon", 0.0, "audit: loss: epsilon 0, from its counts"),
    ("right", 21, "audit: loss: epsilon"),
    ("confidence", 0.99, "audit: loss: epsilon"),
    ("delta", 1e-6, "audit: loss: epsilon"),
    ("canaries", 49, "canaries among 48 units"),
    ("mu", 0.2, "of a Gaussian mechanism, and not all that was released is one"),
]


@pytest.mark.parametrize(("name", "value", "said"), FORGED)
def test_what_does_not_follow_is_told(copy: Path, name: str, value: Any, said: str) -> None:
    add_audit(copy, Audit(attacks={"loss": found(24, copy)}))
    in_record("audit", "loss", name, to=value)(copy)
    seal(copy)
    assert said in failed(copy)


@pytest.mark.parametrize(
    "change",
    [
        in_record("audit", to={}),
        in_record("audit", to=[]),
        in_record("audit", "loss", "guesses", to=10**9),
        in_record("audit", "loss", "right", to=-1),
        in_record("audit", "loss", "confidence", to=0.5),
        in_record("audit", "loss", "delta", to=0.5),
        in_record("audit", "loss", "mu", to="1"),
        in_record("audit", "loss", to=lambda one: {**one, "more": 1}),
        in_record("audit", to=lambda audit: {"<b>loss": audit["loss"]}),
        in_record("audit", to=lambda audit: {f"loss {'a' * i}": audit["loss"] for i in range(1, 10)}),
        in_record("audit", to=lambda audit: {f"loss {'a' * i}": audit["loss"] for i in range(1, 4)}),  # 3 at 80 %
    ],
)
def test_what_is_no_audit_is_not_read(copy: Path, change: Callable[[Path], None]) -> None:
    add_audit(copy, Audit(attacks={"loss": found(24, copy)}))
    change(copy)
    with pytest.raises(LedgerError, match="this is not an audit"):
        verify(copy)


def test_audits_of_something_else_are_not_written(copy: Path) -> None:
    before = (copy / "privacy.json").read_bytes()
    other = dataclasses.replace(found(24, copy), delta=1e-7).again()
    with pytest.raises(LedgerError, match="at delta 1e-07, and the claim is at"):
        add_audit(copy, Audit(attacks={"loss": other}))
    with pytest.raises(LedgerError, match="units were sampled"):
        add_audit(copy, Audit(attacks={"loss": found(24, copy, mu=1.0)}))
    in_record("report", "versions", "hf_dp", to="0.0.1")(copy)
    with pytest.raises(LedgerError, match="another version of hf_dp"):
        add_audit(copy, Audit(attacks={"loss": found(24, copy)}))
    in_record("report", "versions", "hf_dp", to=json.loads(before)["report"]["versions"]["hf_dp"])(copy)
    assert PrivacyRecord.from_json((copy / "privacy.json").read_bytes()) == PrivacyRecord.from_json(before)
