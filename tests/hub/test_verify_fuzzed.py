"""Whatever was done to a record: as it was written it verifies; else some check fails, or it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dp.hub import PrivacyRecord, verify
from tests.strategies import as_text, cases, changed, unless_refused

HERE = Path(__file__).parent
SAVED = [*sorted((HERE / "version1").iterdir()), *sorted((HERE / "dev2").iterdir())]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of saved models, whose records are written over."""
    return [Path(shutil.copytree(path, tmp_path_factory.mktemp("copies") / path.name)) for path in SAVED]


@pytest.mark.fuzzed
@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@cases(50)
@given(st.data())
def test_a_record_verifies_as_it_was_written_and_in_no_other_form(copies: list[Path], data: Any) -> None:
    number = data.draw(st.integers(0, len(SAVED) - 1))
    text = before = (SAVED[number] / "privacy.json").read_bytes()
    if data.draw(st.integers(0, 9)):
        text = data.draw(as_text(data.draw(changed(json.loads(before)))))
    (copies[number] / "privacy.json").write_bytes(text)
    found = unless_refused(lambda: verify(copies[number]))
    if found is None:
        return
    assert found.consistent == (text == before)
    assert "".join(check.found for check in found.checks).encode()
    read = PrivacyRecord.from_json(text)
    assert PrivacyRecord.from_json(read.to_json()).to_json() == read.to_json()
