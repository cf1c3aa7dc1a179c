"""Which files a record speaks of: all that load with the model, whole or in shards, and no others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_dp import PrivacyConfig
from hf_dp.hub import verify, write_card
from hf_dp.hub.record import PrivacyRecord, sha256
from hf_dp.hub.saved import may_be_published
from tests.hub.forging import failed, in_record, invoke, seal
from tests.training.workbench import make

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.parametrize("command", ["verify", "report"])
def test_of_a_checkpoint_in_shards_the_way_to_a_record_is_said(tmp_path: Path, command: str) -> None:
    shards = tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0"
    shards.mkdir(parents=True)
    (shards / "__0_0.distcp").touch()
    for place in (tmp_path, tmp_path / "checkpoint-2"):
        said = invoke(command, str(place))
        assert said.exit_code == 2
        assert "where weights are in FSDP2's shards" in said.stderr
        assert "call save_model" in said.stderr


def test_models_in_folders_of_their_own_are_said(copy: Path) -> None:
    assert any("checked here: checkpoint-2, checkpoint-4. Verify each" in note for note in verify(copy).notes)


def test_names_in_a_record_do_not_lead_out_of_the_folder(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"")
    in_record("files", to={"../outside.safetensors": sha256(tmp_path / "outside.safetensors")})(copy)
    assert "../outside.safetensors: named in the record, but not there" in failed(copy)


def test_a_sharded_model_is_checked_shard_by_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    whole = PreTrainedModel.save_pretrained

    def in_shards(self: Any, *args: Any, **options: Any) -> Any:
        return whole(self, *args, **{**options, "max_shard_size": "20KB"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", in_shards)
    run = make(tmp_path / "out")
    run.privacy = PrivacyConfig(target_epsilon=3.0)
    run.train()
    run.save_model()
    names = {check.name for check in verify(tmp_path / "out").checks}
    shards = {path.name for path in (tmp_path / "out").glob("model-*.safetensors")}
    assert len(shards) > 1
    assert {*shards, "model.safetensors.index.json"} <= names
    assert verify(tmp_path / "out").private
    sorted((tmp_path / "out").glob("model-*.safetensors"))[0].write_bytes(b"")
    assert "safetensors: SHA-256" in failed(tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    ["optimizer.pt", "rng_state.pth", "rng_state_0.pth", "scheduler.pt", "training_args.bin", "trainer_state.json",
     "runs/x/events", "events.out.tfevents.1", "checkpoint-3/model.safetensors", "_hf_dp_fingerprint_key", ".env",
     "../model.safetensors", "/etc/passwd", "README.md", "privacy.json", ".cache/x.json"],
)  # fmt: skip
def test_what_never_goes_up(name: str) -> None:
    assert not may_be_published(name)


def test_a_record_without_the_models_own_weights_is_no_record_of_a_model(copy: Path) -> None:
    shutil.copy(copy / "model.safetensors", copy / "re_attention.safetensors")
    digest = sha256(copy / "re_attention.safetensors")
    in_record("files", to={"re_attention.safetensors": digest})(copy)
    seal(copy)
    assert "weights" in {check.name for check in verify(copy).checks if not check.passed}


def test_code_in_a_folder_of_its_own_is_noticed(copy: Path) -> None:
    (copy / "custom_generate").mkdir()
    (copy / "custom_generate" / "generate.py").write_text("")
    assert "other files" in {check.name for check in verify(copy).checks if not check.passed}


def test_what_lies_beside_a_corpus_would_be_loaded_with_it(copy: Path) -> None:
    folder = copy / "corpus"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text('{"text": "a", "label": "b"}\n')
    record = PrivacyRecord.from_json((copy / "privacy.json").read_bytes())
    (folder / "privacy.json").write_text(record.with_files(folder, ["corpus.jsonl"]).to_json())
    write_card(folder)
    assert verify(folder).private
    for name in ("train.jsonl", "data/more.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("the private texts")
        assert f"other files: not named in the record: {name}" in failed(folder)
        (folder / name).unlink()
