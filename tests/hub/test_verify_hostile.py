"""Files that are made to mislead `verify`, or to keep it busy: a refusal or a failed check, and soon."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from hf_dp.accounting import epsilon, step_event
from hf_dp.errors import LedgerError
from hf_dp.hub import load_report, verify, write_card
from hf_dp.hub.card import BEGIN, END
from hf_dp.hub.record import sha256
from hf_dp.hub.saved import may_be_published
from tests.hub.forging import failed, in_card, in_record, invoke, seal

pytestmark = pytest.mark.usefixtures("checked_once")

BILLION_LAUGHS = "a0: &a0 [lol]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
EVENT = {"type": "poisson_sampled", "sampling_probability": 0.1}


def many_mechanisms(directory: Path, n: int = 2000) -> None:
    entries = [
        {
            "event": {**EVENT, "event": {"type": "gaussian", "noise_multiplier": 1 + i / n}},
            "count": 1,
            "label": "training step",
        }
        for i in range(n)
    ]
    in_record("ledger", "entries", to=entries)(directory)


def many_names(directory: Path, n: int) -> None:
    in_record("files", to=lambda files: {**files, **{f"m{i}.json": "0" * 64 for i in range(n)}})(directory)


def deep_event(n: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(event: dict[str, Any]) -> dict[str, Any]:
        for _ in range(n):
            event = {"type": "self_composed", "count": 1, "event": event}
        return event

    return change


def in_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Changes the card."""

    def apply(directory: Path) -> None:
        card = directory / "README.md"
        card.write_text(change(card.read_text()))

    return apply


# --- what takes long --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: many_mechanisms(d), "2000 different mechanisms"),
        (lambda d: many_names(d, 200_000), "bytes, and no record has more"),
        (lambda d: many_names(d, 5000), "files, and no model has more"),
        (in_record("config", to=lambda config: {**config, "x" * 900_000: 1}), "config is not a promise"),
        (in_record("ledger", "entries", 0, "event", to=deep_event(400)), "nested deeper than 100"),
        (in_record("config", to=lambda config: {**config, "x": json.loads("[" * 300 + "]" * 300)}), "nested deeper"),
        (in_record("report", "unit", to="\ud800"), "half a character"),
        (in_record("report", "unit", to="one\x1b[2Jexample"), "control characters"),
        (in_record("files", to={"a\x00.json": "0" * 64}), "control characters"),
        (in_record("ledger", "entries", 0, "label", to="step\ud800"), "half a character"),
    ],
)
def test_a_record_beyond_all_measure_is_refused_on_one_screen(
    copy: Path, change: Callable[[Path], None], words: str
) -> None:
    change(copy)
    with pytest.raises(LedgerError, match=words):
        verify(copy)
    said = invoke("verify", str(copy))
    assert (said.exit_code, said.stdout) == (2, "")
    assert len(said.stderr) < 6000


@pytest.mark.parametrize(
    "change",
    [
        in_text(lambda text: text.replace("---\n", f"---\n{BILLION_LAUGHS}", 1)),
        in_card("differential_privacy:", "x: &x 1\ny: *x\ndifferential_privacy:"),
        in_text(lambda text: text.replace("---\n", "---\nx: " + "[" * 200_000 + "\n", 1)),
        in_card(r"epsilon_pld: .*", "epsilon_pld: " + "1:" * 120_000 + "1"),
        in_text(lambda text: text.replace("---\n", "---\nx: [" + "a, " * 200_000 + "]\n", 1)),
        in_text(lambda text: text + BEGIN * 30_000),
        in_text(lambda text: text + f"{END}\n{BEGIN}\n" * 15_000),
        in_text(lambda text: text + "[" * 900_000),
        in_text(lambda text: text + "x" * (1 << 21)),
    ],
    ids=["laughs", "alias", "deep", "sexagesimal", "long", "markers", "crossed markers", "brackets", "bytes"],
)
def test_a_card_beyond_all_measure_is_a_failed_check(copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    assert failed(copy).startswith("card")


def test_many_mechanisms_are_added_up_by_the_faster_accountant() -> None:
    event = dp.ComposedDpEvent([dp.SelfComposedDpEvent(step_event(1 + i / 8, 0.1), 2) for i in range(7)])
    assert epsilon(event, 1e-5) == epsilon(event, 1e-5, "rdp")


def test_what_is_no_file_is_not_read(copy: Path) -> None:
    for name in ("README.md", "privacy.json"):
        (copy / name).unlink()
        os.mkfifo(copy / name)
        with pytest.raises(LedgerError, match=f"{name} in .* is no file"):
            verify(copy)


# --- what is not seen -------------------------------------------------------------------------------------------------

AROUND: dict[str, tuple[str, str]] = {
    "comment": ("<!--\n", "\n-->"),
    "comment in a block": ("<div><!--\n\n", "\n\n--></div>"),
    "hidden": ("<div hidden>\n\n", "\n\n</div>"),
    "display:none": ('<div style="display:none">\n\n', "\n\n</div>"),
    "no end": ("<div hidden/>\n\n", ""),
    "half a tag": ("<div hidden\n\n", ""),
    "crossed": ("<b><div hidden></b>\n\n", ""),
    "inline": ("text <span hidden>\n\n", "\n\n</span>"),
    "details": ("<details><summary>More</summary>\n\n", "\n\n</details>"),
    "fence": ("```\n", "\n```"),
    "open fence": ("~~~~html\n", ""),
    "script": ("<script>\n", "\n</script>"),
    "textarea": ("<textarea>\n", "\n</textarea>"),
    "template": ("<template>\n\n", "\n\n</template>"),
    "instruction": ("<?php\n", "\n?>"),
    "declaration": ("<!X\n", "\n>"),
    "style before": ("<style>table { display: none }</style>\n\n", ""),
    "style behind": ("", "\n\n<style>table { display: none }</style>"),
    "list": ("- ", ""),
    "no comment": ("<!--> <div style='display:none'> -->\n\n", ""),
    "no comment either": ("<!---> <div style='display:none'> -->\n\n", ""),
    "comment with another end": ("<!-- a --!> <div style='display:none'> -->\n\n", ""),
    "comment with a blank in its end": ("<!-- a -- > <div hidden> -->\n\n", ""),
    "CDATA": ("<![CDATA[ > <div hidden> ]]>\n\n", ""),
    "instruction before": ("<?x > <div hidden> ?>\n\n", ""),
    "declaration before": ("<!X '>' <div hidden> >\n\n", ""),
    "end of nothing": ("<div></ x='<!--'><!-- '> --></div>\n\n", ""),
    "text for tags": ("<textarea><!-- </textarea><div hidden> --></textarea>\n\n", ""),
    "title for tags": ("<title><!-- </title><div hidden> --></title>\n\n", ""),
    "body": ("<body hidden></body>\n\n", ""),
    "dialog": ("<dialog open>Epsilon is 0.1.</dialog>\n\n", ""),
    "laid over it": ("<div style='position:fixed;inset:0;background:white'>no</div>\n\n", ""),
    "laid over it from behind": ("", "\n\n<div style='margin-top: -90em; background: white'>no</div>"),
    "laid over it by a class": ("<div class='fixed inset-0 bg-white'>no</div>\n\n", ""),
    "an escape in its style": ("<div style='p\\6fsition:fixed'>no</div>\n\n", ""),
    "a comment in its style": ("<div style='a:b;/*;*/position:fixed'>no</div>\n\n", ""),
}


@pytest.mark.parametrize("case", AROUND)
def test_a_privacy_section_that_nobody_sees_is_noticed(copy: Path, case: str) -> None:
    before, behind = AROUND[case]
    in_text(lambda text: text.replace(BEGIN, before + BEGIN).replace(END, END + behind))(copy)
    assert failed(copy).startswith("card, visible: "), failed(copy)


@pytest.mark.parametrize("end", ["\u2028", "\x0c", "\x0b", "\x85"])
def test_a_section_on_one_line_is_noticed(copy: Path, end: str) -> None:
    text = (copy / "README.md").read_text()
    section = text[text.index(BEGIN) : text.index(END)]
    in_text(lambda card: card.replace(section, section.replace("\n", end)))(copy)
    assert "card, text" in failed(copy)


def test_a_mark_of_the_byte_order_is_no_difference(copy: Path) -> None:
    card = copy / "README.md"
    card.write_bytes(b"\xef\xbb\xbf" + card.read_bytes())
    assert verify(copy).private, failed(copy)


@pytest.mark.parametrize("before", ["    ", "> "])
def test_a_section_of_which_every_line_is_moved_is_noticed(copy: Path, before: str) -> None:
    def move(text: str) -> str:
        head, rest = text.split(BEGIN)
        inside, tail = rest.split(END)
        return head + "\n".join(before + line for line in f"{BEGIN}{inside}{END}".splitlines()) + tail

    in_text(move)(copy)
    assert "card, " in failed(copy)


def test_a_section_in_the_metadata_is_none(copy: Path) -> None:
    text = (copy / "README.md").read_text()
    section = text[text.index(BEGIN) : text.index(END) + len(END)]
    block = "\n".join(f"  {line}" for line in section.splitlines())
    in_text(lambda text: text.replace(section, "").replace("---\n", f"---\nx: |\n{block}\n", 1))(copy)
    assert "card, text" in failed(copy)


@pytest.mark.parametrize(
    "text",
    [
        '<p align="center"><img src="a.png"></p>\n\n',
        "Use `<mask>` and\n\n```html\n<div hidden>\n```\n\n",
        "<!-- a note -->\n\n<details><summary>More</summary>\n\ntext\n\n</details>\n\n",
        '<div align="center" style="text-align: center; margin: 0 auto"><img src="a.png" width="60%"/></div>\n\n',
        "<!--- a note --->\n\n`<!-->` and <!-- two -- notes --> `<![CDATA[`\n\n",
        "a < b\n- [link](x)\n\n| a |\n| - |\n| b |\n\n",
    ],
)
def test_what_people_write_before_the_section_hides_nothing(copy: Path, text: str) -> None:
    in_text(lambda card: card.replace(BEGIN, text + BEGIN))(copy)
    assert verify(copy).private, failed(copy)


def test_a_section_is_not_written_into_code_nor_between_crossed_marks(copy: Path) -> None:
    old = (copy / "README.md").read_text()
    section = old[old.index(BEGIN) : old.index(END) + len(END)]
    body = f"# A\n\n```bash\n\n## a comment\n```\n\n{END}{BEGIN}\n## B\n{section.replace('Privacy', 'OLD')}\n"
    (copy / "README.md").write_text(body)
    write_card(copy)
    assert verify(copy).private, failed(copy)
    written = (copy / "README.md").read_text()
    assert written.index("a comment") < written.index(BEGIN) < written.index("## B")
    assert "OLD" not in written


# --- what loads with the model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["_evil.py", "chat_template.jinja", "added_tokens.json", "special_tokens_map.json", "tokenizer.json", "vocab.txt",
     "additional_chat_templates/rag.jinja", "custom_generate/generate.py", "custom_generate/requirements.txt",
     "modules.json", "quantized/model.gguf", "PYTORCH_MODEL.BIN", "Trainer_State.json",
     ".hidden.py", "license.py", "model", "training_args.py", "optimizer.safetensors", "_hf_dp_evil.py", "runs/evil.py",
     "checkpoint-1/evil.py", "_saved/evil.py", "_saving/EVIL.PY", "seed-0/evil.py", "seed-0/model.pkl",
     "Custom_Generate/config.json", "seed-0/training_args.bin", "seed-0/x", "checkpoint-2/pytorch_model.bin",
     "sub/training_args.bin",
     "custom_generate/notes.txt", "my_vocab.txt", "pieces.txt", "data/train.py"],
)  # fmt: skip
def test_what_is_not_known_to_be_harmless_is_strange(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("{}")
    assert failed(copy).startswith(f"other files: not named in the record: {name}")


def test_a_record_of_its_own_does_not_cover_what_the_model_above_loads(copy: Path) -> None:
    for folder, name in (("custom_generate", "generate.py"), ("additional_chat_templates", "a.jinja"), ("x", "y.py")):
        (copy / folder).mkdir()
        shutil.copy(copy / "privacy.json", copy / folder / "privacy.json")
        (copy / folder / name).write_text("")
        assert f"{folder}/{name}" in failed(copy)
        shutil.rmtree(copy / folder)


def test_a_linked_folder_is_seen(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "generate.py").write_text("")
    (copy / "custom_generate").symlink_to(tmp_path / "elsewhere")
    assert "other files: not named in the record: custom_generate" in failed(copy)


def test_what_is_harmless_and_what_training_leaves_is_no_difference(copy: Path) -> None:
    for name in (".gitattributes", "LICENSE", "license.txt", "NOTES.md", "figure.png", ".cache/huggingface/x.metadata",
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


def test_many_strange_files_are_counted(copy: Path) -> None:
    for i in range(40):
        (copy / f"x{i}.bin").write_text("")
    assert "and 30 more" in failed(copy)


# --- what a record may name -------------------------------------------------------------------------------------------


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


# --- the noise of the steps under a given noise -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainings in one ledger, the second with larger batches, under a given noise."""
    from hf_dp import PrivacyConfig
    from tests.training.workbench import make

    path = tmp_path_factory.mktemp("staged") / "out"
    run = make(path, privacy=PrivacyConfig(noise_multiplier=1.5), max_steps=2)
    run.train()
    run._expected_batch_size = 12
    run.train()
    run.save_model()
    assert len(run.ledger.entries) == 2
    return path


def refreshed(directory: Path) -> None:
    """Epsilon, the card and all digests anew, as a forger would who can compute."""
    from hf_dp.hub.record import PrivacyRecord
    from tests.hub.forging import forged

    record = PrivacyRecord.from_json((directory / "privacy.json").read_text())
    forged(directory, [(event, count) for event, count, _ in record.ledger.entries], steps=record.ledger.steps)


@pytest.mark.parametrize(
    ("entry", "change"),
    [
        (0, {"noise_multiplier": 12.0}),
        (1, {"noise_multiplier": 12.0}),
        (0, {"sampling_probability": 0.0}),
        pytest.param(0, {"sampling_probability": 1e-6}, marks=pytest.mark.slow),
        pytest.param(0, {"sampling_probability": 0.99 / 48}, marks=pytest.mark.slow),
        (1, {"sampling_probability": 1 / 48}),
    ],
)
def test_each_stage_has_the_noise_of_the_promise(
    staged: Path, tmp_path: Path, entry: int, change: dict[str, Any]
) -> None:
    copy = Path(shutil.copytree(staged, tmp_path / "copy"))
    assert verify(copy).private, failed(copy)
    values = json.loads((copy / "privacy.json").read_text())
    event = values["ledger"]["entries"][entry]["event"]
    for name, value in change.items():
        (event["event"] if name in event["event"] else event)[name] = value
    (copy / "privacy.json").write_text(json.dumps(values))
    refreshed(copy)
    assert "noise of the steps" in failed(copy) or "sampling probability" in failed(copy)
    assert "epsilon" not in failed(copy), "the forger's epsilon follows from the ledger"


def test_the_noise_that_a_config_gives_is_that_of_the_claim(staged: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(staged, tmp_path / "copy"))
    in_record("config", "noise_multiplier", to=3.0)(copy)
    in_record("ledger", "promise", "noise_multiplier", to=3.0)(copy)
    seal(copy)
    assert "noise_multiplier: 1.5 in the mechanism, 3.0 in the config" in failed(copy)


def test_a_report_reads_what_a_forger_wrote_without_being_kept_busy(copy: Path) -> None:
    many_mechanisms(copy)
    assert load_report(copy).steps == 4


@pytest.mark.parametrize("change", [in_record("report", "caveats", 0, to=1), in_record("report", "unit", to=[1])])
def test_what_is_no_text_is_not_printed_as_one(copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    for command in ("report", "verify"):
        said = invoke(command, str(copy))
        assert said.exit_code == 2, said.exception
        assert "is no text" in said.stderr
