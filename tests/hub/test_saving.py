"""Saving over an earlier model, beside what people wrote, and until the process is killed or the disk full."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dp import PrivacyConfig, load_report
from hf_dp.errors import ConfigurationError
from hf_dp.hub import PrivacyRecord, model_files, saved_aside, verify, write_card
from hf_dp.hub.card import BEGIN, privacy_section
from hf_dp.hub.saved import may_be_published
from tests.crashes import digests, killed_everywhere
from tests.hub.test_publish import trainer
from tests.training.workbench import classifier, with_lora

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a saved model; to be copied, and saved over."""
    path = tmp_path_factory.mktemp("saved") / "out"
    run = trainer(path)
    run.train()
    run.save_model()
    return path


def another(path: Path, model: Any = None, epsilon: float = 5.0, **changes: Any) -> Any:
    """A trained run with another claim than `saved`."""
    run = trainer(path, model, **changes)
    run.privacy = PrivacyConfig(target_epsilon=epsilon)
    run.train()
    return run


def known(run: Any) -> None:
    """The numbers of its card are, in each thread and fork that begins later."""
    privacy_section(run.privacy_report(), run.ledger, run.privacy)


@pytest.mark.slow
def test_two_saves_at_once_follow_one_another(tmp_path: Path) -> None:
    run = another(tmp_path)
    known(run)
    threads = [threading.Thread(target=run.save_model) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify(tmp_path).private


@pytest.mark.slow
def test_a_folder_of_its_own_and_a_link(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "real"))
    (tmp_path / "link").symlink_to(copy)
    (copy / "blob.log").write_bytes(b"somebody's")
    (copy / "config.json").unlink()
    (copy / "config.json").symlink_to(copy / "blob.log")
    another(tmp_path / "run").save_model(str(tmp_path / "link"))
    assert verify(copy).private
    assert (copy / "blob.log").read_bytes() == b"somebody's", "not written through a link"
    assert load_report(copy).target_epsilon == 5.0


@pytest.mark.slow
def test_an_earlier_model_goes_with_its_record(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "out"))
    card = copy / "README.md"
    card.write_text(card.read_text() + "\n## Mine\n\nwords of mine\n")
    (copy / "model-00001-of-00002.safetensors").write_bytes(b"of a save that was broken off")
    another(copy, with_lora()).save_model()
    assert not list(copy.glob("model*"))
    assert not (copy / "config.json").exists(), "it would be loaded beside the adapter"
    assert "words of mine" in card.read_text()
    assert verify(copy).private, verify(copy).checks


@pytest.mark.slow
def test_failure_34_killed_while_a_model_is_saved_over_another_no_claim_is_false(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "out"))
    run, found = another(path), list[float | None]()
    known(run)
    for _ in killed_everywhere(path, run.save_model):
        if "epsilon" in text(path):
            assert verify(path).private, verify(path).checks
            found.append(load_report(path).target_epsilon)
        else:  # A record without a card says by digests what it is about.
            found.append(None)
    assert found == [3.0] * found.count(3.0) + [None] * found.count(None) + [5.0] * found.count(5.0)
    assert found.count(3.0) > found.count(None) > 0 < found.count(5.0)
    assert not (path / "_saving-model").exists()


def text(folder: Path) -> str:
    return (folder / "README.md").read_text()


@pytest.mark.slow
def test_failure_34_a_save_that_fails_leaves_the_model_before_it(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "out"))
    run, before = another(path), digests(path)
    monkeypatch.setattr(torch, "save", lambda *args, **options: (_ for _ in ()).throw(RuntimeError("unexpected pos 1")))
    with pytest.raises(OSError, match="No space to write .* What was saved here before is as it was"):
        run.save_model()
    assert digests(path) == before
    assert verify(path).private


def test_weights_without_a_plan_take_the_claim_away(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "out"))
    trainer(path).save_model()
    assert not (path / "privacy.json").exists()
    for words in ("epsilon", "differential", "What is protected"):
        assert words not in text(path)


@pytest.mark.slow
def test_the_claim_is_computed_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    run = another(tmp_path)
    order: list[str] = []
    plan, own = run._plan, type(run)._save

    class Noting(type(run)):  # type: ignore[misc]
        def _save(self, *args: Any, **options: Any) -> None:
            order.append("weights")
            own(self, *args, **options)

    run.__class__ = Noting
    report = type(plan).report
    monkeypatch.setattr(type(plan), "report", lambda *args: (order.append("report"), report(*args))[1])
    run.save_model()
    assert order == ["report", "weights"]


def test_only_what_was_written_aside_belongs_to_the_model(tmp_path: Path) -> None:
    (tmp_path / "customers.csv").write_text("private")
    (tmp_path / "latest").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    with saved_aside(tmp_path) as aside:
        for name in ("model.safetensors", "training_args.bin", "sub/adapter_model.safetensors", "runs/log.txt"):
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_bytes(b"1")
        (aside / "linked.json").symlink_to(tmp_path / "customers.csv")
        (tmp_path / "merges.txt").write_text("of somebody else")
        assert model_files(aside) == ["model.safetensors", "sub/adapter_model.safetensors"]
    assert (tmp_path / "sub" / "adapter_model.safetensors").read_bytes() == b"1"
    assert (tmp_path / "training_args.bin").exists()
    assert not (tmp_path / "_saving-model").exists()


UNREADABLE = {
    "another encoding": "# Mod\xe8le\n".encode("latin-1"),
    "broken metadata": b"---\na: [\n---\n# mine\n",
    "a list": b"---\n- a\n- b\n---\n# mine\n",
    "tags that are a number": b"---\ntags: 5\n---\n# mine\n",
    "results that are none": b"---\nmodel-index: 5\n---\n# mine\n",
    "broken, with a claim": f"---\na: [\n---\n{BEGIN}\n".encode(),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_card_that_cannot_be_read_is_kept_aside_and_the_model_saved(
    saved: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(saved, tmp_path)
    for number, name in enumerate(["README.old.md", "README.old-2.md"]):
        content = UNREADABLE[case] + b"%d" % number
        (folder / "README.md").write_bytes(content)
        caplog.clear()
        resaved(folder)
        assert (folder / name).read_bytes() == content
        assert [name in record.message for record in caplog.records] == [True]
        assert verify(folder).private
    assert not may_be_published("README.old.md")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("---\ntags: foo\nbase_model: 5\n---\n# mine\n", "- foo\n"),
        ("---\ntags: [2024, foo]\nbase_model: [5]\n---\n# mine\n", "- '2024'\n"),
        ("\ufeff---\nlicense: mit\n---\n# mine\n", "license: mit"),
        ("<details>\n\n# mine\n\n## more\n\n</details>\n", "</details>"),
        ("<div align=center>\n\n# mine\n", "<div align=center>"),
        ("# mine\n<!-- to do\n\n## Usage\n-->\n", "<!-- to do"),
        ("# mine\n<!-- to do\n", "<!-- to do"),
    ],
)
def test_in_a_persons_card_the_section_is_seen(saved: Path, tmp_path: Path, text: str, kept: str) -> None:
    folder = copied(saved, tmp_path)
    (folder / "README.md").write_text(text)
    for _ in range(2):
        resaved(folder)
        card = (folder / "README.md").read_text()
        assert kept in card
        assert "# mine" in card
        assert verify(folder).private
    assert not list(folder.glob("README.old*"))


@pytest.mark.parametrize("text", ["<style>p {}</style>\n\n# mine\n", "# mine\n" + "words " * 12_000])
def test_a_card_in_which_no_section_is_seen_is_said(
    saved: Path, tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(saved, tmp_path)
    (folder / "README.md").write_text(text)
    with monkeypatch.context() as patched:
        patched.setattr("hf_dp.ranks.rank", lambda: 1)
        resaved(folder)
    assert "privacy section" not in caplog.text, "of many processes the first says it"
    resaved(folder)
    assert "might not see its privacy section" in caplog.text
    assert [check.name for check in verify(folder).checks if not check.passed] == ["card, visible"]


@pytest.mark.parametrize("name", ["README.md", "privacy.json", "_saving", "_saved", "_saving-model"])
def test_what_has_the_name_of_what_is_written_is_refused_before_training(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out"
    run = trainer(path)
    path.mkdir(exist_ok=True)
    (path / name).write_text("mine") if name.startswith("_") else (path / name).mkdir()
    with pytest.raises(ConfigurationError, match=f"{name} is a "):
        run.train()
    assert run.ledger.steps == 0
    if name in ("README.md", "privacy.json", "_saving-model"):
        with pytest.raises(ConfigurationError, match=f"{name} is a "), saved_aside(path):
            raise AssertionError("nothing is written")


def test_a_readme_that_is_a_folder_is_refused_by_a_card_alone(tmp_path: Path) -> None:
    run = another(tmp_path / "out")
    (tmp_path / "out" / "README.md").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="README.md is a folder") as caught:
        run.create_model_card()
    assert "rename it" in str(caught.value)


OWN = "\n## How to use it\n\n```python\n## no heading\nload()\n```\n\n## Contact\n\nAsk A.\n\n## Contact\n\nOr B.\n"


@pytest.mark.parametrize("kind", [classifier, with_lora])
@pytest.mark.slow
def test_a_card_that_is_made_anew_keeps_what_people_wrote(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "out"
    run = another(path, kind(), eval_strategy="epoch")
    run.save_model()
    (path / "README.md").write_text(text(path).replace("---\n", "---\nlicense: mit\n", 1) + OWN)
    run.create_model_card(results=True)
    assert "Training Loss" in text(path)
    assert "More information needed" not in text(path)
    filled = text(path).replace("## Training procedure", "## Model description\n\nMine.\n\n## Training procedure", 1)
    (path / "README.md").write_text(filled)
    found = []
    for _ in range(2):
        run.save_model()
        run.create_model_card()
        found.append(text(path))
    assert found[0] == found[1]
    for part in (OWN, "license: mit", "description\n\nMine.\n", "### Training hyperparameters"):
        assert found[0].count(part) == 1, part
    for words in ("Training Loss", "Loss:", "computed without noise", "Model Card Contact", "[More Information", "[]("):
        assert words not in found[0], words
    assert verify(path).private


def test_an_introduction_of_ones_own_takes_the_place_of_trainers(tmp_path: Path) -> None:
    path = tmp_path / "out"
    run = another(path)
    run.save_model()
    (path / "README.md").write_text("# A name\n\nWhat it is for.\n\n## How\n\nSo.\n")
    for _ in range(2):
        run.save_model()
        run.create_model_card()
    assert text(path).count("# A name\n\nWhat it is for.\n") == 1
    assert "generated automatically" not in text(path)
    assert verify(path).private


def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "out")
    return tmp_path / "out"


def resaved(folder: Path) -> None:
    """Saves the same model with its record once more, as a trainer does."""
    record = PrivacyRecord.from_json((folder / "privacy.json").read_bytes())
    with saved_aside(folder) as aside:
        for name in record.files:
            shutil.copy2(folder / name, aside / name)
        (aside / "privacy.json").write_text(record.to_json())
        write_card(aside, "out", record)
