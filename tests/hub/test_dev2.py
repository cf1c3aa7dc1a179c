"""Models that 0.1.0.dev2 saved verify, in whose cards words stand that later versions say otherwise.

`dev2/` was written by the code of 7b5294e: `capped` has batches with a hard cap, of which it could not say what several
rows of one person cost.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hf_dp.accounting import truncated
from hf_dp.hub import verify
from hf_dp.hub.card import privacy_section
from hf_dp.hub.record import PrivacyRecord, sha256_of_text
from hf_dp.versions import library_versions
from tests.hub.forging import failed, in_record

SAVED = Path(__file__).parent / "dev2" / "capped"
pytestmark = pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")


@pytest.mark.slow
def test_what_was_said_of_capped_batches_then_is_no_claim_that_is_wrong_now(tmp_path: Path) -> None:
    record = PrivacyRecord.from_json((SAVED / "privacy.json").read_bytes())
    assert record.report.versions["hf_dp"] == "0.1.0.dev2" != library_versions()["hf_dp"]
    assert sha256_of_text(privacy_section(record.report, record.ledger, record.config)) != record.card_sha256
    found = verify(SAVED)
    assert (found.consistent, found.private) == (True, True), failed(SAVED)
    # Its words are nobody's to change all the same, and its numbers follow.
    copy = Path(shutil.copytree(SAVED, tmp_path / "copy"))
    card = copy / "README.md"
    card.write_text(card.read_text().replace("how much is not computed for these batches", "not at all"))
    assert not verify(copy).consistent
    shutil.copy(SAVED / "README.md", card)
    in_record("report", "epsilon", to=1.0)(copy)
    assert not verify(copy).consistent


@pytest.mark.slow
def test_negative_control_under_the_version_of_today_they_do_not_follow(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(SAVED, tmp_path / "copy"))
    in_record("report", "versions", "hf_dp", to=library_versions()["hf_dp"])(copy)
    assert json.loads((copy / "privacy.json").read_text())["report"]["versions"]["hf_dp"] != "0.1.0.dev2"
    assert "words of the card" in failed(copy)
