"""What others write into the folder of a model while it is saved: what is the model's goes with it, and no more."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_dp.errors import ConfigurationError
from hf_dp.hub import PrivacyRecord, model_files, saved_aside, verify
from tests.hub.server import Hub
from tests.hub.test_publish import MODEL, NAME, TOKENIZER, trainer

pytestmark = pytest.mark.usefixtures("checked_once")


class Writer:
    """Writes what is not the model's into a folder, as long as it is open."""

    NAMES = ("metrics.json", "sample_1.txt", "data.csv", "sub/dump.parquet", "model_of_mine.safetensors")

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop = folder, threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            for name in self.NAMES:
                (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self._folder / name).write_text(f"private {number}")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("strategy", ["end", "every_save"])
@pytest.mark.slow
def test_failure_34_what_others_write_while_the_model_is_saved_stays_at_home(
    hub: Hub, tmp_path: Path, strategy: str
) -> None:
    path = tmp_path / "out"
    run = trainer(
        path, save_strategy="steps", save_steps=2, push_to_hub=True, hub_token="hf_writer", hub_strategy=strategy,
        hub_always_push=True,
    )  # fmt: skip
    path.mkdir(exist_ok=True)
    with Writer(path):
        run.train()
        run.push_to_hub()
    for _, _, files in hub.repositories[NAME].commits:
        assert set(files) <= MODEL | TOKENIZER
    assert set(hub.repositories[NAME].files) == MODEL | TOKENIZER
    assert verify(NAME).private
    assert all((path / name).read_text().startswith("private") for name in Writer.NAMES), "and is not taken away"


def test_what_a_callback_writes_at_a_save_is_not_the_models(tmp_path: Path) -> None:
    class Metrics(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for folder in (Path(args.output_dir), Path(args.output_dir) / f"checkpoint-{state.global_step}"):
                (folder / "metrics.json").write_text(json.dumps(state.log_history))

    run = trainer(tmp_path, save_strategy="steps", save_steps=4)
    run.add_callback(Metrics())
    run.train()
    run.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        assert set(json.loads((folder / "privacy.json").read_text())["files"]) == {
            *TOKENIZER, "config.json", "model.safetensors",
        }  # fmt: skip
        assert (folder / "metrics.json").exists()


@pytest.mark.slow
def test_what_a_subclass_saves_is_the_models(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    own = type(run)._save

    class Saving(type(run)):  # type: ignore[misc]
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            own(self, output_dir, state_dict)
            (Path(output_dir) / "1_Pooling").mkdir()
            (Path(output_dir) / "1_Pooling" / "config.json").write_text("{}")

    run.__class__ = Saving
    run.save_model()
    assert "1_Pooling/config.json" in json.loads((tmp_path / "privacy.json").read_text())["files"]
    assert verify(tmp_path).private
    assert (tmp_path / "training_args.bin").exists(), "as Trainer leaves it"


def test_of_what_a_tokenizer_saves_all_goes_with_the_model_or_is_said(tmp_path: Path, caplog: Any) -> None:
    run = trainer(tmp_path)
    run.train()
    texts = ("pieces.txt", "vocab.bpe", "lexicon.vocab", "language_model/unigrams.txt", "language_model/5gram.arpa")
    own = type(run)._save

    class Saving(type(run)):  # type: ignore[misc]
        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            own(self, output_dir, state_dict)
            for name in (*texts, "words.txt", "vocab.pkl"):
                (Path(output_dir) / name).parent.mkdir(exist_ok=True)
                (Path(output_dir) / name).write_text("a")

    run.__class__ = Saving
    with caplog.at_level("WARNING", "hf_dp"):
        run.save_model()
    assert set(texts) < set(json.loads((tmp_path / "privacy.json").read_text())["files"])
    assert "never published, as such files could hold private data: vocab.pkl, words.txt." in caplog.text
    assert "words.txt" not in str([check for check in verify(tmp_path).checks if not check.passed])


def test_failure_131_of_two_processes_that_save_into_one_folder_none_claims_the_weights_of_the_other(
    tmp_path: Path,
) -> None:
    """As it is where each process of several trains alone, by mistake."""
    before = Path(__file__).parent / "version1"
    read = PrivacyRecord.from_json
    records = [read(read((before / name / "privacy.json").read_bytes()).to_json()) for name in ("plain", "adafest")]

    def write(folder: Path, number: int) -> None:
        folder.mkdir(exist_ok=True)  # as `save_pretrained`
        (folder / "model.safetensors").write_text(str(number))

    def claim(folder: Path, number: int) -> None:
        record = records[number].with_files(folder, model_files(folder))
        (folder / "privacy.json").write_text(record.to_json())

    # Of one thread none waits for the other, as of two processes.
    saves = [saved_aside(tmp_path), saved_aside(tmp_path)]
    folders = []
    for number, save in enumerate(saves):
        folders.append(save.__enter__())
        write(folders[number], number)
    with suppress(FileNotFoundError):
        claim(folders[0], 0)
    with pytest.raises(ConfigurationError, match="another process saves a model"):
        saves[0].__exit__(None, None, None)
    claim(folders[1], 1)
    saves[1].__exit__(None, None, None)
    assert (tmp_path / "model.safetensors").read_text() == "1"
    record = PrivacyRecord.from_json((tmp_path / "privacy.json").read_bytes())
    assert record == records[1].with_files(tmp_path, ["model.safetensors"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "privacy.json"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_what_another_process_cleared_away_is_not_saved_by_halves(tmp_path: Path, is_made_again: bool) -> None:
    def save() -> None:
        with saved_aside(tmp_path) as folder:
            (folder / "model.safetensors").write_text("")
            with saved_aside(tmp_path) as other:
                (other / "config.json").write_text("{}")
            if is_made_again:
                folder.mkdir(parents=True)  # as by `save_pretrained`
            (folder / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigurationError, match="another process saves a model"):
        save()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
