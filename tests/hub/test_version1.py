"""Models and checkpoints that were saved with privacy.json of version 1 verify, and are gone on from, for ever.

`version1/` was written by the code of b4e8cd9, one folder for each kind of run; each has a tiny model.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForSequenceClassification

from hf_dp import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
from hf_dp.accounting import Mechanism
from hf_dp.errors import HfDpError
from hf_dp.hub import verify, write_card
from hf_dp.hub.card import privacy_section
from hf_dp.hub.record import PrivacyRecord, sha256, sha256_of_text
from tests.hub.forging import failed, in_card, in_record, invoke
from tests.training.workbench import make

SAVED = Path(__file__).parent / "version1"
NOT_PRIVATE = {"reproducible", "no_noise"}


@pytest.mark.few(6)
@pytest.mark.filterwarnings("ignore:noise_multiplier=0")
@pytest.mark.parametrize("name", sorted(path.name for path in SAVED.iterdir()))
def test_a_record_of_version_1_verifies(name: str) -> None:
    for directory in (SAVED / name, SAVED / name / "checkpoint-2"):
        if directory.is_dir():
            found = verify(directory)
            assert found.consistent, failed(directory)
            assert found.private is (name not in NOT_PRIVATE)
            assert not any("privacy section" in line for line in found.proven)
            assert invoke("verify", str(directory)).exit_code == int(name in NOT_PRIVATE)
            (said,) = (check.found for check in found.checks if check.name == "neighbouring datasets")
            assert said == "add or remove one, that is: replace one by nothing (zero-out), n public"


def numbers(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for name, item in items for found in numbers(item, (*path, name))]
    return [path] if isinstance(value, (int, float)) else []


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["re_attention", "fest", "adafest"])
def test_any_number_that_is_changed_is_noticed(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(SAVED / name, tmp_path / "copy"))
    file, text, card = copy / "privacy.json", (SAVED / name / "privacy.json").read_text(), (copy / "README.md")
    before, believed = card.read_text(), set()
    for path in numbers(json.loads(text)):
        if path[0] == "version":
            continue
        file.write_text(text)
        card.write_text(before)
        in_record(*path, to=lambda old: not old if isinstance(old, bool) else old * 2 + 1)(copy)
        # A forger writes the card's digest of the record anew.
        in_card(r"record_sha256: .*", f"record_sha256: {sha256(file)}")(copy)
        try:
            if verify(copy).consistent:
                believed.add(path)
        except HfDpError:
            pass
    # As ever: these stood in one place alone, and no epsilon follows from them.
    assert believed == {("config", "withhold_non_private_logs"), ("ledger", "promise", "planned_steps")}


def test_a_record_of_version_1_is_one_of_today() -> None:
    record = PrivacyRecord.from_json((SAVED / "fest" / "privacy.json").read_bytes())
    assert (record.version, record.report.steps) == (1, 4)
    assert [(r.label, r.times, r.every) for r in record.mechanism.releases] == [("embedding rows", 2, 2)]
    assert [r.label for r in record.report.releases] == ["embedding rows"]
    again = PrivacyRecord.from_json(record.to_json())
    assert (again.version, again.mechanism, again.report) == (2, record.mechanism, record.report)
    assert Mechanism.from_dict(record.mechanism.to_dict()) == record.mechanism


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"target_epsilon": 8.0},
    "noise_multiplier": {"noise_multiplier": 1.25, "clipping_norm": 0.5},
    "re_attention": {"target_epsilon": 8.0, "re_attention": ReAttentionConfig()},
    "fest": {
        "target_epsilon": 8.0,
        "sparse_embeddings": SparseEmbeddingConfig(method="fest", kept_rows=5, renew_every=2),
    },
    "adafest": {"target_epsilon": 8.0, "sparse_embeddings": SparseEmbeddingConfig(threshold=1.0)},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("noise_multiplier", "fest", "re_attention")))
        for name in CONFIGS
    ],
)
def test_a_checkpoint_of_version_1_is_gone_on_from(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(SAVED / name, tmp_path / "copy"))
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(copy / "checkpoint-2")
    trainer = make(copy, model, PrivacyConfig(**CONFIGS[name]))
    trainer._save_rng_state(str(copy / "checkpoint-2"))  # of any run: 14 kB each, which are not kept
    trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    before = PrivacyRecord.from_json((SAVED / name / "privacy.json").read_bytes())
    assert trainer.ledger == before.ledger
    assert trainer.privacy_report().epsilon == pytest.approx(before.report.epsilon, rel=1e-6)
    trainer.save_model()
    assert verify(copy).private, failed(copy)
    other = make(copy, model, PrivacyConfig(**{**CONFIGS[name], "clipping_norm": 0.75}))
    with pytest.raises(HfDpError, match="belongs to another run"):
        other.train(resume_from_checkpoint=str(copy / "checkpoint-2"))


def test_a_card_that_is_written_again_keeps_the_words_that_its_record_knows(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(SAVED / "plain", tmp_path / "copy"))
    write_card(copy)
    assert verify(copy).consistent, failed(copy)


@pytest.mark.parametrize("name", ["queries", "releases"])
def test_a_claim_in_words_of_later_versions_is_refused(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(SAVED / "plain", tmp_path / "copy"))
    values = json.loads((copy / "privacy.json").read_text())
    values["report"][name] = []
    (copy / "privacy.json").write_text(json.dumps(values))
    with pytest.raises(HfDpError, match="report"):
        verify(copy)


def test_only_earlier_versions_may_say_add_or_remove(tmp_path: Path) -> None:
    """As `--share` of a corpus would from a model of version 1, were its words not put right."""
    copy = Path(shutil.copytree(SAVED / "plain", tmp_path / "copy"))
    record = PrivacyRecord.from_json((copy / "privacy.json").read_bytes())
    (copy / "privacy.json").write_text(record.to_json())
    assert "neighbouring datasets" in failed(copy)
    report = dataclasses.replace(record.report, adjacency=record.mechanism.unit.adjacency)
    card = sha256_of_text(privacy_section(report, record.ledger, record.config))
    (copy / "privacy.json").write_text(dataclasses.replace(record, report=report, card_sha256=card).to_json())
    write_card(copy)
    assert "neighbouring datasets" not in failed(copy)
