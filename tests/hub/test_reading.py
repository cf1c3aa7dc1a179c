"""What `hf-dp report` and `verify` read: folders, checkpoints, repositories; what cannot be read is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from hf_dp import PrivacyConfig, load_report
from hf_dp.accounting import Ledger
from hf_dp.accounting.risk import risk
from hf_dp.errors import HubError
from hf_dp.hub import open_source
from tests.hub.forging import invoke
from tests.hub.server import TOKEN, Hub
from tests.training.workbench import make

pytestmark = pytest.mark.usefixtures("checked_once")


def test_what_is_no_place_is_refused(hub: Hub) -> None:
    with pytest.raises(HubError, match="no folder '.*', and no repository of that name that this token may read"):
        load_report("someone/nothing")
    with pytest.raises(HubError, match="no folder 'not/a/name/at/all'"):
        load_report("not/a/name/at/all")
    hub.fail = lambda method, path: "drop"
    with pytest.raises(HubError, match="no folder '.*', and no repository of that name could be read"):
        load_report("someone/nothing")


def test_a_folder_without_a_record_is_not_walked_to_its_end(tmp_path: Path) -> None:
    """It may be somebody's home. Of a model all is listed, since all of it would be loaded, or published."""
    for folder in ("out/checkpoint-2/parts", "out/checkpoint-²"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "privacy.json").write_text("{}")
    assert open_source(tmp_path).names == {"out/checkpoint-²/privacy.json"}
    said = invoke("report", str(tmp_path))
    assert (said.exit_code, type(said.exception)) == (2, SystemExit)
    assert "There is one in out/checkpoint-²." in said.stderr.replace("\n", " ")
    (tmp_path / "privacy.json").write_text("{}")
    assert "out/checkpoint-2/parts/privacy.json" in open_source(tmp_path).names


@pytest.mark.few(18)
@pytest.mark.parametrize("command", ["report", "verify"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["a" * 5000],
        ["\x01"],
        [""],
        ["a/b/c"],
        ["someone/x", "more"],
        ["--nonsense"],
        [],
        ["FILE"],
        ["EMPTY"],
        ["LIST"],
        ["DEEP"],
        ["DIRECTORY"],
        ["EMPTY", "--json"],
        ["LIST", "--json"],
        ["DEEP", "--json"],
    ],
    ids=lambda arguments: " ".join(arguments)[:20],
)
def test_what_cannot_be_read_is_refused_without_a_traceback(
    command: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    (tmp_path / "DIRECTORY" / "privacy.json").mkdir(parents=True)
    for name, text in {"EMPTY": "", "LIST": "[1]", "DEEP": "[" * 100_000}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "privacy.json").write_text(text)
    said = invoke(command, *arguments)
    assert said.exit_code == 2, said.output
    assert "Traceback" not in said.output
    assert not said.stdout


def test_a_revision_that_is_not_there_is_named_to_callers_and_on_the_command_line(hub: Hub) -> None:
    huggingface_hub.HfApi(endpoint=hub.endpoint, token=TOKEN).create_repo("someone/model")
    with pytest.raises(HubError, match="has no such revision") as caught:
        load_report("someone/model", revision="nowhere")
    assert caught.value.fix == "correct the revision (on the command line --revision)."


def test_a_token_that_cannot_be_one_is_refused(hub: Hub) -> None:
    with pytest.raises(HubError, match="letters that no token has"):
        load_report("someone/nothing", token="geheim\u00e4")


def test_a_system_error_is_said_without_a_traceback(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "privacy.json")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    for command in ("report", "verify"):
        said = invoke(command, str(copy))
        assert said.exit_code == 2
        assert "PermissionError" in said.stderr
        assert "Traceback" not in said.output


def test_offline_is_said(tmp_path: Path) -> None:
    said = invoke("verify", "someone/nothing")
    assert said.exit_code == 2
    assert "HF_HUB_OFFLINE" in said.stderr


@pytest.mark.parametrize(
    "command",
    [["report"], ["verify"], ["plan", "--n", "9", "--batch-size", "2", "--steps", "2", "--epsilon", "8", "--after"]],
)
@pytest.mark.parametrize("place", ["out/classify/", "./NOTHERE", "/nowhere/at/all", "FILE"])
def test_of_what_can_be_no_name_on_the_hub_nothing_is_said_but_that_it_is_no_folder(
    command: list[str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    said = invoke(*command, place)
    assert said.exit_code == 2
    assert ("is no folder, but a file" if place == "FILE" else f"there is no folder {place!r}.") in said.stderr
    assert not any(word in said.stderr for word in ("token", "network", "HF_HUB_OFFLINE"))


def test_first_it_is_said_that_there_is_no_such_folder() -> None:
    said = invoke("report", "NOTHERE", "--figure", "x.png")
    assert said.stderr.startswith("Refused: there is no folder 'NOTHERE', and no repository of that name can be read")


def test_report_reads_a_folder_a_checkpoint_and_an_interrupted_run(saved: Path, copy: Path) -> None:
    said = invoke("report", str(saved))
    assert said.exit_code == 0
    for words in (
        "epsilon 3 at delta",
        "one training example",
        "training step",
        "Poisson sample",
        "How well membership",
    ):
        assert words in said.stdout
    (copy / "privacy.json").unlink()
    values = json.loads(invoke("report", str(copy), "--json").stdout)
    assert values["source"].endswith("checkpoint-4")
    assert "There is one in checkpoint-2, checkpoint-4." in invoke("verify", str(copy)).stderr.replace("\n", " ")
    assert values["report"] == load_report(saved / "checkpoint-4").to_dict()
    assert Ledger.from_dict(values["ledger"]).steps == 4
    assert values["risk"] == risk(Ledger.from_dict(values["ledger"]).event).to_dict()


def test_report_of_a_run_that_is_not_private_tells_no_risk() -> None:
    saved = str(Path(__file__).parent / "version1" / "reproducible")
    values = json.loads(invoke("report", saved, "--json").stdout)
    assert (values["report"]["private"], values["risk"]) == (False, None)
    assert "membership" not in invoke("report", saved).stdout


@pytest.mark.slow
def test_report_shows_a_run_that_is_newer_than_the_finished_one_beside_it(saved: Path, copy: Path) -> None:
    run = make(copy, privacy=PrivacyConfig(target_epsilon=5.0), save_strategy="steps", save_steps=2, max_steps=2)
    run.train()
    values = json.loads(invoke("report", str(copy), "--json").stdout)
    assert (values["source"], values["report"]["target_epsilon"]) == (f"{copy}/checkpoint-2", 5.0)
    said = invoke("report", str(copy))
    assert f"{copy}/checkpoint-2, the newest here; {copy} holds an older model" in said.stdout
    run.save_model()
    assert json.loads(invoke("report", str(copy), "--json").stdout)["source"] == str(copy)
    assert "older" not in invoke("report", str(saved)).stdout


def test_report_of_one_run_does_not_ask_the_clock(copy: Path) -> None:
    for name in ("seed-9", "checkpoint-²", "checkpoint-3x"):
        shutil.copytree(copy / "checkpoint-2", copy / name)
    os.utime(copy / "checkpoint-2" / "privacy.json")
    values = json.loads(invoke("report", str(copy), "--json").stdout)
    assert (values["source"], values["report"]["steps"]) == (str(copy), 4)
    (copy / "privacy.json").unlink()
    (copy / "checkpoint-1").mkdir()
    (copy / "checkpoint-1" / "privacy.json").write_text("damaged")
    os.utime(copy / "checkpoint-1" / "privacy.json", (0, 0))
    assert json.loads(invoke("report", str(copy), "--json").stdout)["source"].endswith("checkpoint-4")


def test_no_name_is_not_this_folder(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    for command in ("report", "verify"):
        said = invoke(command, "")
        assert (said.exit_code, "there is no folder ''" in said.stderr) == (2, True)
    assert invoke("verify", ".").exit_code == 0


def test_report_of_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    said = invoke("report", str(tmp_path))
    assert said.exit_code == 2
    assert "there is no privacy.json" in said.stderr
    assert "save_pretrained writes weights alone" in " ".join(said.stderr.split())
    assert "Traceback" not in said.output
