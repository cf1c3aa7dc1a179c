"""Which files a record speaks of: all that load with the model, whole or in shards, and no others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_dp import PrivacyConfig
from hf_dp.hub import verify, write_card
from hf_dp.hub.record import PrivacyRecord, sha256
from hf_dp.hub.saved import may_be_published
from tests.hub.forging import failed, in_record, in_text, invoke, seal
from tests.hub.server import Hub
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


@pytest.fixture
def corpus(copy: Path) -> Path:
    """Texts with the record of a model."""
    folder = copy / "corpus"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text('{"text": "a", "label": "b"}\n')
    record = PrivacyRecord.from_json((copy / "privacy.json").read_bytes())
    (folder / "privacy.json").write_text(record.with_files(folder, ["corpus.jsonl"]).to_json())
    write_card(folder)
    return folder


def test_what_lies_beside_a_corpus_would_be_loaded_with_it(corpus: Path) -> None:
    (corpus / ".gitattributes").write_text("*.jsonl filter=lfs\n")
    assert verify(corpus).private, failed(corpus)
    for name in ("train.jsonl", "data/more.parquet", ".huggingface.yaml"):
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_text("the private texts")
        assert f"other files: not named in the record: {name}" in failed(corpus)
        (corpus / name).unlink()


def test_a_record_of_its_own_does_not_cover_what_is_loaded_with_a_corpus(corpus: Path) -> None:
    """`load_dataset` looks into all folders, and for data in `data` first."""
    (corpus / "data").mkdir()
    (corpus / "data" / "privacy.json").write_text("{}")
    (corpus / "data" / "train.jsonl").write_text("the private texts")
    assert "other files: not named in the record: data/privacy.json, data/train.jsonl" in failed(corpus)


OTHERS = "https://example.org/others.jsonl"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "metadata",
    [
        f"configs:\n- config_name: default\n  data_files: {OTHERS}\n",
        "configs:\n- config_name: default\n  data_files: ../corpus.jsonl\n",
        f"configs:\n- config_name: a\n  data_files: corpus.jsonl\n- data_files: [corpus.jsonl, {OTHERS}]\n",
        f"configs: [{{config_name: a, data_files: [{{split: train, path: [{OTHERS}]}}]}}]\n",
        f"configs: [{{config_name: a, data_files: {{split: {OTHERS}}}}}]\n",
        f'"configs": [{{config_name: a, data_files: {{train: {OTHERS}}}}}]\n',
        "configs:\n- config_name: default\n  data_dir: ..\n",
        f"configs: {{data_files: {OTHERS}}}\n",
        f"<<: {{configs: [{{config_name: a, data_files: {OTHERS}}}]}}\n",
        "configs: [{config_name: a, data_files: '*'}]\n",
        "configs: [{config_name: a, data_files: '*.jso*'}]\n",
        "configs: [{config_name: a, data_files: 'train*.jsonl'}]\n",
        "configs: [{config_name: a, data_files: '../*.jsonl'}]\n",
        "configs: [{config_name: a, data_files: 'https://example.org/*.jsonl'}]\n",
        f"x: &x {{config_name: a, data_files: {OTHERS}}}\nconfigs: [*x]\n",
        f"x: &x {{data_files: {OTHERS}}}\nconfigs: [{{config_name: a, <<: *x}}]\n",
    ],
)
def test_a_card_that_has_other_texts_loaded_than_the_corpus_is_noticed(corpus: Path, metadata: str) -> None:
    """`load_dataset` reads there which files to load, wherever these lie."""
    in_text(lambda text: text.replace("---\n", f"---\n{metadata}", 1))(corpus)
    assert failed(corpus).startswith("card, data: "), failed(corpus)


@pytest.mark.parametrize(
    "metadata",
    [
        "configs:\n- config_name: default\n  data_files: corpus.jsonl\n",
        "configs:\n- config_name: default\n  default: true\n  data_files:\n  - split: train\n    path: corpus.jsonl\n",
        "configs: [{config_name: a, data_files: '*.jsonl'}, {config_name: b, data_files: [corpus*, 'corpus.????l']}]\n",
        "x: &x corpus.jsonl\nconfigs: [{config_name: a, data_files: *x}, {config_name: b, data_files: *x}]\n",
        "task_categories: [text-classification]\nsize_categories: [n<1K]\n",
    ],
)
def test_a_card_may_say_how_a_corpus_is_loaded(corpus: Path, metadata: str) -> None:
    in_text(lambda text: text.replace("---\n", f"---\n{metadata}", 1))(corpus)
    assert verify(corpus).private, failed(corpus)


@pytest.mark.few(20)
@pytest.mark.parametrize(
    "name",
    ["_evil.py", "chat_template.jinja", "added_tokens.json", "special_tokens_map.json", "tokenizer.json", "vocab.txt",
     "additional_chat_templates/rag.jinja", "custom_generate/generate.py", "custom_generate/requirements.txt",
     "modules.json", "quantized/model.gguf", "PYTORCH_MODEL.BIN", "Trainer_State.json",
     ".hidden.py", "license.py", "model", "training_args.py", "optimizer.safetensors", "_hf_dp_evil.py", "runs/evil.py",
     "checkpoint-1/evil.py", "_saved/evil.py", "_saving/EVIL.PY", "seed-0/evil.py", "seed-0/model.pkl",
     "Custom_Generate/config.json", "seed-0/training_args.bin", "seed-0/x", "checkpoint-2/pytorch_model.bin",
     "sub/training_args.bin",
     "readme.md", "ReadMe.MD", ".model.gguf", ".onnx/model.onnx", ".hidden.BIN", ".a/b.pickle",
     "custom_generate/notes.txt", "my_vocab.txt", "pieces.txt", "data/train.py"],
)  # fmt: skip
def test_what_is_not_known_to_be_harmless_is_strange(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("{}")
    assert failed(copy).startswith(f"other files: not named in the record: {name}")


def test_a_record_of_its_own_does_not_cover_a_folder_of_the_model_above(copy: Path) -> None:
    """An encoder lies there, say, and whoever loads it loads an adapter beside it."""
    (copy / "0_Transformer").mkdir()
    shutil.copy(copy / "config.json", copy / "0_Transformer" / "config.json")
    record = PrivacyRecord.from_json((copy / "privacy.json").read_bytes())
    names = [*record.files, "0_Transformer/config.json"]
    (copy / "privacy.json").write_text(record.with_files(copy, names).to_json())
    write_card(copy)
    assert verify(copy).private, failed(copy)
    for name in ("privacy.json", "adapter_config.json", "adapter_model.safetensors"):
        (copy / "0_Transformer" / name).write_text("{}")
    assert "other files: not named in the record: 0_Transformer/adapter_config.json" in failed(copy)


def test_a_record_of_its_own_does_not_cover_what_the_model_above_loads(copy: Path) -> None:
    for folder, name in (("custom_generate", "generate.py"), ("additional_chat_templates", "a.jinja"), ("x", "y.py")):
        (copy / folder).mkdir()
        shutil.copy(copy / "privacy.json", copy / folder / "privacy.json")
        (copy / folder / name).write_text("")
        assert f"{folder}/{name}" in failed(copy)
        shutil.rmtree(copy / folder)


@pytest.mark.parametrize("name", ["onnx/model.onnx", "q4/model-Q4_K_M.GGUF", "x/tf.msgpack", "x/.y/model.gguf"])
def test_failure_157_a_record_of_its_own_does_not_cover_weights_that_no_record_names(copy: Path, name: str) -> None:
    """Tools find them in every folder of a repository."""
    folder = copy / name.split("/")[0]
    folder.mkdir()
    shutil.copy(copy / "privacy.json", folder / "privacy.json")
    assert verify(copy).private, failed(copy)
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("")
    assert failed(copy).startswith(f"other files: not named in the record: {name}"), failed(copy)


def test_failure_157_names_of_several_lines_are_told_on_one(copy: Path) -> None:
    folder = copy / "x\nVerified: epsilon 0.01 at delta 1e-09.\nProven:"
    folder.mkdir()
    (folder / "privacy.json").write_text("{}")
    assert verify(copy).private, failed(copy)
    assert "\nProven" not in "".join(verify(copy).notes)
    assert "\nVerified: epsilon 0.01" not in invoke("verify", str(copy)).stdout


def test_failure_157_weights_under_a_name_with_a_dot_are_strange_on_the_hub(hub: Hub, copy: Path) -> None:
    files = {
        name: (copy / name).read_bytes()
        for name in ("README.md", "privacy.json", *PrivacyRecord.from_json((copy / "privacy.json").read_bytes()).files)
    }
    hub.publish("someone/whole", {**files, ".gitattributes": b""})
    assert verify("someone/whole").private, failed("someone/whole")
    hub.publish("someone/more", {**files, ".q/model.safetensors": b""})
    assert "other files: not named in the record: .q/model.safetensors" in failed("someone/more")


def test_a_pointer_of_git_lfs_is_called_one(copy: Path) -> None:
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert failed(copy).endswith("a pointer of git-lfs, which `git lfs pull` replaces by the file")


def test_failure_157_weights_beside_a_corpus_let_nothing_else_be_loaded_with_it(corpus: Path, copy: Path) -> None:
    shutil.copy(copy / "model.safetensors", corpus / "model.safetensors")
    record = PrivacyRecord.from_json((corpus / "privacy.json").read_bytes())
    names = ["corpus.jsonl", "model.safetensors"]
    (corpus / "privacy.json").write_text(record.with_files(corpus, names).to_json())
    write_card(corpus)
    (corpus / "train.jsonl").write_text("the private texts")
    assert "other files: not named in the record: train.jsonl" in failed(corpus)


def test_a_linked_folder_is_seen(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "generate.py").write_text("")
    (copy / "custom_generate").symlink_to(tmp_path / "elsewhere")
    assert "other files: not named in the record: custom_generate" in failed(copy)


def test_what_is_harmless_and_what_training_leaves_is_no_difference(copy: Path) -> None:
    for name in (".gitattributes", "LICENSE", "license.txt", "NOTES.md", "figure.png", "a/1.wav",
                 ".cache/huggingface/x.metadata",
                 "all_results.json", "rng_state_1.pth", "runs/a/events.out.tfevents.1", "final/privacy.json",
                 "final/model.safetensors", "notes.txt", "log.txt", "metrics.json", "requirements.txt", "nohup.out",
                 "slurm-1.out", "x.npy", "plots/x.html", "wandb/run/files/config.yaml", "wandb/run-1.wandb",
                 "mlruns/0/params/lr", "tensorboard/events.out.tfevents.1", "logs/a.txt",
                 "_saved/checkpoint-2/config.json", "_hf_dp_lock", "checkpoint-2/rng_state_0.pth"):  # fmt: skip
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    assert verify(copy).private, failed(copy)


def test_a_model_in_a_folder_of_its_own_loads_nothing_here_and_is_said_to_claim_nothing(copy: Path) -> None:
    names = ("seed-0/config.json", "seed-0/model.safetensors", "seed-0/_hf_dp_lock", "seed-0/tokenizer.json",
             "seed-0/trainer_state.json", "checkpoint-best/config.json", "1_Pooling/config.json",
             "checkpoint-best/adapter_model.safetensors", "logs/model.safetensors")  # fmt: skip
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("{}")
    found = verify(copy)
    assert found.private, failed(copy)
    assert any("without a privacy.json" in note and "checkpoint-best" in note for note in found.notes), found.notes


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"vocab_file": "./seed-0/vocab.json"}),
        ("config.json", {"base": ["a", {"at": "/home/me/copy/Seed-0"}]}),
        ("model.safetensors.index.json", {"weight_map": {"w": "seed-0\\config.json"}}),
        ("modules.json", "[not JSON"),
    ],
)
def test_a_folder_that_the_model_names_is_loaded_with_it(copy: Path, file: str, content: Any) -> None:
    (copy / "seed-0").mkdir()
    (copy / "seed-0" / "config.json").write_text("{}")
    assert verify(copy).private
    (copy / file).write_text(content if isinstance(content, str) else json.dumps(content))
    in_record("files", to=lambda files: {**files, file: sha256(copy / file)})(copy)
    seal(copy)
    assert failed(copy).startswith("other files: not named in the record: seed-0/config.json")


def test_of_the_models_own_code_a_checkpoint_has_a_copy(copy: Path) -> None:
    for name in ("modeling.py", "checkpoint-2/modeling.py"):
        (copy / name).write_text("VALUE = 1")
    in_record("files", to=lambda files: {**files, "modeling.py": sha256(copy / "modeling.py")})(copy)
    seal(copy)
    assert verify(copy).private, failed(copy)
    (copy / "checkpoint-2" / "modeling.py").write_text("VALUE = 2")
    assert "checkpoint-2/modeling.py" in failed(copy)


@pytest.mark.parametrize(
    ("told", "is_said"), [("someone/other", True), ("[someone/other, someone/base]", False), ("someone/base", False)]
)
def test_an_adapter_on_another_base_than_the_card_names_is_said(copy: Path, told: str, is_said: bool) -> None:
    (copy / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    in_record("files", to=lambda files: {**files, "adapter_config.json": sha256(copy / "adapter_config.json")})(copy)
    seal(copy)
    in_text(lambda text: re.sub(r"(base_model: .*\n)?tags:", f"base_model: {told}\ntags:", text, count=1))(copy)
    found = verify(copy)
    assert found.private, failed(copy)
    assert any("loaded onto 'someone/base'" in note for note in found.notes) == is_said, found.notes


def test_many_strange_files_are_counted(copy: Path) -> None:
    for i in range(40):
        (copy / f"x{i}.bin").write_text("")
    assert "and 30 more" in failed(copy)


@pytest.mark.parametrize(
    "name", ["Trainer_State.json", "log.txt", "train.csv", "Eval_Results.json", "weights.BIN", "sub/RUNS/x.json", "x"]
)
def test_a_record_that_names_no_file_of_a_model_is_noticed(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_text("{}")
    in_record("files", to=lambda files: {**files, name: sha256(copy / name)})(copy)
    seal(copy)
    assert failed(copy) == f"{name}: named in the record, and no file of a model or a corpus"


def test_a_link_out_of_the_folder_is_no_file_of_the_model(copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / "config.json", tmp_path / "config.json")
    (copy / "config.json").symlink_to(tmp_path / "config.json")
    assert failed(copy).startswith("config.json: named in the record, and no file in this folder")


def test_the_links_of_the_hubs_own_cache_are_read(copy: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--a--b" / "snapshots" / "0123"
    cached.parent.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    shutil.rmtree(copy / "checkpoint-2")
    shutil.rmtree(copy / "checkpoint-4")
    shutil.copytree(copy, blobs)
    cached.mkdir()
    for path in blobs.iterdir():
        (cached / path.name).symlink_to(Path("../../blobs") / path.name)
    assert verify(cached).private, failed(cached)


def test_every_vocabulary_of_transformers_may_be_published() -> None:
    import transformers

    sources = (Path(transformers.__file__).parent / "models").glob("*/tokenization*.py")
    found = {name for path in sources for name in re.findall(r'_file": "([^"]+)"', path.read_text(encoding="utf-8"))}
    assert len(found) > 15
    assert [name for name in sorted(found) if not may_be_published(name)] == []
