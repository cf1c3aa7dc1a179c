"""From training to the hub and back, with the real client against a hub on this machine."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import hf_dp
from hf_dp import PrivacyConfig, load_report
from hf_dp.data.fingerprint import KEY_FILE
from hf_dp.errors import ConfigurationError, HubError, LedgerError
from hf_dp.hub import upload, verify
from hf_dp.hub.record import INSTALL
from hf_dp.hub.upload import checked_card
from hf_dp.training.resuming.resume import note_trained_by
from tests.hub.server import READER, Hub
from tests.training.workbench import a_tokenizer, classifier, make, pad, rows, with_lora

pytestmark = pytest.mark.usefixtures("checked_once")

NAME = "someone/private-model"
MODEL = {".gitattributes", "README.md", "config.json", "model.safetensors", "privacy.json"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
#: What Trainer leaves in output directories and, left to itself, uploads.
NEVER = (
    "training_args",
    "optimizer",
    "scheduler",
    "rng_state",
    "trainer_state",
    "runs/",
    "scaler",
    KEY_FILE,
    "notes",
    "results",
)


def trainer(path: Path, model: Any = None, **changes: Any) -> Any:
    values = {"hub_model_id": NAME, "logging_steps": 1, **changes}
    parts = {"processing_class": a_tokenizer({"a", "b"}), "eval_dataset": rows(8, seed=5)}
    return make(path, model or classifier(), PrivacyConfig(target_epsilon=3.0), parts=parts, **values)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("trained") / "out"
    run = trainer(path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    run.train()
    (path / "runs").mkdir()
    (path / "runs" / "events.out.tfevents.1").write_bytes(b"losses")
    (path / "notes.json").write_text("{}")
    (path / "train_results.json").write_text('{"train_loss": 1}')
    return run


@pytest.fixture
def trained(trained_once: Any, tmp_path: Path) -> Any:
    """After training, with things in an output directory of its own that are nobody's business."""
    run, args = copy.copy(trained_once), copy.copy(trained_once.args)
    args.output_dir = str(shutil.copytree(args.output_dir, tmp_path / "out"))
    run.args = args
    note_trained_by(run.model, run, run.ledger)
    return run


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**pad(rows(4))).logits


def no_secret_is_in(files: dict[str, bytes], run: Any) -> None:
    for name, content in files.items():
        assert not any(part in name for part in NEVER), name
        assert (Path(run.args.output_dir) / KEY_FILE).read_bytes() not in content
        if not name.endswith(".safetensors"):
            assert b"seed" not in content, name
            assert b"hf_writer" not in content, name


def test_what_is_pushed_loads_again_and_verifies(hub: Hub, trained: Any) -> None:
    trained.push_to_hub()
    repository = hub.repositories[NAME]
    assert set(repository.files) == MODEL | TOKENIZER
    no_secret_is_in(repository.files, trained)
    assert len(repository.commits) == 2, "one commit beside the initial one: all of it or nothing"

    again = AutoModelForSequenceClassification.from_pretrained(NAME)
    assert torch.equal(logits(again), logits(trained.model))
    assert AutoTokenizer.from_pretrained(NAME)("a b")["input_ids"] == trained.processing_class("a b")["input_ids"]
    assert load_report(NAME) == trained.privacy_report()
    found = verify(NAME)
    assert found.private, found.checks
    assert found.source == f"{NAME} at {repository.head}"
    assert found.epsilons["pld"] <= 3.0 < found.epsilons["rdp"]


@pytest.mark.slow
def test_a_log_that_lies_in_the_output_directory_stays_there(hub: Hub, tmp_path: Path) -> None:
    run = trainer(tmp_path / "out")
    log = tmp_path / "out" / "messages.txt"
    log.parent.mkdir(exist_ok=True)
    handler, before = logging.FileHandler(log), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    transformers.logging.add_handler(handler)
    try:
        run.train()
        written = log.stat().st_size
        run.push_to_hub()
    finally:
        transformers.logging.remove_handler(handler)
        transformers.logging.set_verbosity(before)
        handler.close()
    assert log.stat().st_size > written > 0, "nothing was logged while the model was saved"
    assert set(hub.repositories[NAME].files) == MODEL | TOKENIZER
    assert verify(NAME).private


@pytest.mark.slow
def test_a_path_that_peft_writes_is_said_before_it_goes_up(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "home" / "base"
    classifier().save_pretrained(base)
    run = trainer(tmp_path / "out", with_lora(AutoModelForSequenceClassification.from_pretrained(base)))
    run.train()
    run.push_to_hub()
    assert f"names the base model by a place on this machine, {str(base)!r}" in caplog.text
    card = hub.repositories[NAME].files["README.md"].decode()
    assert str(tmp_path) not in card
    assert "from scratch" not in card


def test_the_card_tells_of_privacy_and_of_no_losses(hub: Hub, trained: Any) -> None:
    trained.push_to_hub(tags="banking", license="mit")
    card = ModelCard(hub.repositories[NAME].files["README.md"].decode())
    assert {"banking", "differential-privacy", "dp-sgd", "hf_dp"} <= set(card.data.tags)
    assert card.data.license == "mit"
    said = card.data["differential_privacy"]
    assert said["epsilon_pld"] == trained.privacy_report().epsilon
    assert said["epsilon_rdp"] == trained.privacy_report().epsilon_rdp
    assert f"Install hf_dp, version {hf_dp.__version__}, {INSTALL}." in card.text
    for words in ("## Privacy", "one training example", "not covered", "Poisson", "hf-dp verify", "learning_rate: 0.1"):
        assert words in card.text, words
    for words in ("Training Loss", "eval_loss", "Loss:", "seed"):
        assert words not in card.text, words

    trained.push_to_hub(results=True)
    asked_for = hub.repositories[NAME].files["README.md"].decode()
    assert "Training Loss" in asked_for
    assert "not covered by epsilon" in asked_for
    assert verify(NAME).private


@pytest.mark.slow
def test_a_pushed_adapter_loads_with_peft(hub: Hub, tmp_path: Path) -> None:
    run = trainer(tmp_path / "out", with_lora())
    run.train()
    run.push_to_hub()
    files = hub.repositories[NAME].files
    assert set(files) == (MODEL - {"config.json", "model.safetensors"}) | TOKENIZER | {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    no_secret_is_in(files, run)
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "peft"
    assert {"lora", "differential-privacy"} <= set(card.data.tags)
    again = PeftModel.from_pretrained(classifier(), NAME)
    assert torch.equal(logits(again), logits(run.model))
    assert verify(NAME).private


@pytest.mark.slow
def test_a_merged_model_takes_the_place_of_the_adapter_that_was_pushed_before(hub: Hub, tmp_path: Path) -> None:
    run = trainer(tmp_path / "out", with_lora())
    run.train()
    run.push_to_hub()
    repository = hub.repositories[NAME]
    kept = {name: content for name, content in repository.files.items() if name != "adapter_config.json"}
    assert "adapter_model.safetensors" in kept
    repository.commit("by hand", {**kept, "notes.md": b"mine"})
    run.model = run.model.merge_and_unload()
    run.push_to_hub()
    assert set(repository.files) == MODEL | TOKENIZER | {"notes.md"}
    assert verify(NAME).private
    assert torch.equal(logits(AutoModelForSequenceClassification.from_pretrained(NAME)), logits(run.model))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strategy",
    [
        "end",
        "checkpoint",
        *(pytest.param(other, marks=pytest.mark.slow) for other in ("every_save", "all_checkpoints")),
    ],
)
def test_nothing_private_goes_up_whatever_the_hub_strategy(
    hub: Hub, tmp_path: Path, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"push_to_hub": True, "hub_strategy": strategy, "hub_token": "hf_writer", "hub_always_push": True}
    run = trainer(tmp_path / "out", save_strategy="steps", save_steps=2, save_total_limit=1, **changes)
    run.train()
    repository = hub.repositories[NAME]
    folders = {"end": [], "every_save": [], "checkpoint": ["last-checkpoint"]}
    during = [message for _, message, _ in repository.commits[1:]]
    assert len(during) == {"end": 0, "every_save": 2}.get(strategy, 4)
    for folder in folders.get(strategy, ["checkpoint-2", "checkpoint-4"]):
        assert {f"{folder}/{name}" for name in (MODEL | TOKENIZER) - {".gitattributes"}} <= set(repository.files)
    assert ("not what resuming them needs" in caplog.text) == ("checkpoint" in strategy)
    if strategy != "end":
        assert verify(NAME).private, "the model of a checkpoint has its own record, and they fit together"
        assert load_report(NAME).steps == 4
    run.push_to_hub()
    for _, _, files in repository.commits:
        no_secret_is_in(files, run)
    assert verify(NAME).private


@pytest.mark.slow
def test_save_model_with_push_to_hub_pushes(hub: Hub, tmp_path: Path) -> None:
    run = trainer(tmp_path / "out", push_to_hub=True, hub_token="hf_writer")
    run.train()
    run.save_model(str(tmp_path / "elsewhere"))
    assert hub.repositories[NAME].commits[-1][1] == "Model save"
    run.save_model()
    for place in (tmp_path / "elsewhere", tmp_path / "out", NAME):
        assert verify(place).private, verify(place).checks


@pytest.mark.slow
def test_a_private_repository_needs_its_token(hub: Hub, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained.args.hub_private_repo = True
    trained.push_to_hub()
    assert hub.repositories[NAME].private
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(HubError, match="no repository of that name that this token may read"):
        verify(NAME)
    assert verify(NAME, token=READER).private
    assert load_report(NAME, token=READER).steps == 4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("failing", "answer"),
    [
        (("PUT", "/lfs/"), "drop"),
        pytest.param(("PUT", "/lfs/"), 503, marks=pytest.mark.slow),
        pytest.param(("POST", "/commit/"), "drop", marks=pytest.mark.slow),
        (("POST", "/commit/"), 409),
        pytest.param(("POST", "/preupload/"), 401, marks=pytest.mark.slow),
    ],
)
def test_a_push_that_fails_shows_nothing_loses_nothing_and_can_be_repeated(
    hub: Hub, trained: Any, failing: tuple[str, str], answer: Any
) -> None:
    hub.fail = lambda method, path: answer if method == failing[0] and failing[1] in path else None
    with pytest.raises((OSError, RuntimeError, HfHubHTTPError, *HfHubHTTPError.__bases__)) as caught:
        trained.push_to_hub()
    assert any("Nothing is lost" in note for note in caught.value.__notes__)
    assert set(hub.repositories[NAME].files) == {".gitattributes"}, "half a model was published"
    (Path(trained.args.output_dir) / "notes.json").unlink()  # which a library might load
    assert verify(trained.args.output_dir).private
    hub.fail = lambda method, path: None
    trained.push_to_hub()
    assert verify(NAME).private


@pytest.mark.slow
def test_a_repository_that_is_there_already_is_used(hub: Hub, trained: Any) -> None:
    trained.push_to_hub()
    commits = len(hub.repositories[NAME].commits)
    trained.hub_model_id = None
    trained.push_to_hub()  # create answers 409
    assert len(hub.repositories[NAME].commits) == commits + 1


def test_without_permission_the_hub_s_own_error_is_raised(
    hub: Hub, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HfHubHTTPError, match="401"):
        trained.push_to_hub(token="hf_wrong")
    assert not hub.repositories


@pytest.mark.slow
def test_a_push_that_fails_during_training_is_said_and_training_goes_on(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(
        tmp_path / "out", save_strategy="steps", save_steps=2, push_to_hub=True, hub_token="hf_writer",
        hub_always_push=True,
    )  # fmt: skip
    hub.fail = lambda method, path: 500 if "/commit/" in path else None
    with caplog.at_level(logging.WARNING):
        run.train()
    assert run.state.global_step == 4
    assert "A push during training failed" in caplog.text
    hub.fail = lambda method, path: None
    run.push_to_hub(blocking=False).result()
    assert verify(NAME).private


def test_before_training_there_is_nothing_to_claim(hub: Hub, tmp_path: Path) -> None:
    run = trainer(tmp_path / "out")
    with pytest.raises(ConfigurationError, match="push_to_hub before train"):
        run.push_to_hub()
    assert not hub.requests


@pytest.mark.slow
def test_saving_untrained_weights_over_a_private_model_takes_the_record_away(tmp_path: Path) -> None:
    trained = trainer(tmp_path / "out")
    trained.train()
    trained.save_model()
    trainer(tmp_path / "out").save_model()
    assert not (tmp_path / "out" / "privacy.json").exists()


@pytest.mark.slow
def test_a_seeded_run_is_published_as_not_private(hub: Hub, tmp_path: Path) -> None:
    run = trainer(tmp_path / "out")
    run.privacy = run.privacy.replace(seed=123454321)
    run.train()
    run.push_to_hub()
    files = hub.repositories[NAME].files
    card = ModelCard(files["README.md"].decode())
    assert "**This model is not private.**" in card.text
    assert "differential-privacy" not in card.data.tags
    assert all(b"123454321" not in content for content in files.values())
    found = verify(NAME)
    assert found.consistent
    assert not found.private
    assert json.loads(files["privacy.json"])["report"]["private"] is False


def test_trackio_is_not_asked_to_publish_losses(tmp_path: Path) -> None:
    if not hasattr(make(tmp_path).args, "trackio_static_space_id"):
        pytest.skip("this version of Transformers has no static Trackio space")
    assert make(tmp_path).args.trackio_static_space_id is False
    assert make(tmp_path, trackio_static_space_id="me/losses").args.trackio_static_space_id == "me/losses"


@pytest.mark.parametrize("text", ["# experiment log: train loss 0.123\n", pytest.param(None, marks=pytest.mark.slow)])
def test_a_card_that_another_process_wrote_does_not_go_up(trained: Any, tmp_path: Path, text: str | None) -> None:
    trained.save_model(str(tmp_path / "model"))
    card = tmp_path / "model" / "README.md"
    assert checked_card(tmp_path / "model") == card.read_bytes()
    card.unlink() if text is None else card.write_text(text)
    with pytest.raises(LedgerError, match=r"there is no README\.md|is not the card of privacy\.json"):
        upload(tmp_path / "model", "someone/model", message="x")
