"""Recipes with models and data by their names on a hub: as a user runs them, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets import config as datasets_config
from huggingface_hub import constants
from transformers import AutoTokenizer

from hf_dp.errors import ConfigurationError
from tests.hub.server import READER, Hub
from tests.recipes.conftest import (  # noqa: F401 - fixtures
    LABELS,
    TEMPLATE,
    WORDS,
    causal_directory,
    encoder_directory,
    masked_directory,
    questions_directory,
    train,
)
from tests.recipes.running import ROOT

pytestmark = pytest.mark.usefixtures("checked_once")

PUBLIC = ["--train_file", "someone/questions", "--test_file", "someone/questions", "--label_column", "label"]
PRIVATE = [flag.replace("/questions", "/private-questions") for flag in PUBLIC]
PRIVATE += ["--encoder", "someone/private-encoder", "--labels_file", ""]
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: train.csv
  - split: test
    path: test.csv
dataset_info:
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': card_lost
          '1': cash_fee
          '2': top_up
---
"""


def questions(n: int) -> list[dict[str, Any]]:
    draw = random.Random(n)
    return [{"text": " ".join(draw.choices(WORDS, k=draw.randint(2, 8))) + "?", "label": i % 3} for i in range(n)]


def as_parquet(rows: list[dict[str, Any]], features: Features | None = None) -> bytes:
    file = io.BytesIO()
    Dataset.from_list(rows, features=features).to_parquet(file)
    return file.getvalue()


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


@pytest.fixture
def filled(hub: Hub, causal_directory: Path, encoder_directory: Path, masked_directory: Path) -> Hub:  # noqa: F811
    """A hub with models and data sets; what is called private is."""
    for name, directory in {"causal": causal_directory, "masked": masked_directory}.items():
        hub.publish(f"someone/{name}", directory)
    hub.publish("someone/private-encoder", encoder_directory, private=True)
    kinds = Features({"text": Value("string"), "label": ClassLabel(names=LABELS)})
    in_parts = {
        "data/train-00000-of-00002.parquet": as_parquet(questions(40), kinds),
        "data/train-00001-of-00002.parquet": as_parquet(questions(20), kinds),
        "data/test-00000-of-00001.parquet": as_parquet(questions(12), kinds),
    }
    hub.publish("datasets/someone/private-questions", in_parts, private=True)
    rows = {f"{split}.csv": as_csv(questions(n)) for split, n in (("train", 60), ("test", 12))}
    hub.publish("datasets/someone/questions", {"README.md": CARD.encode(), **rows})
    return hub


@pytest.fixture
def named(filled: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """That hub for the clients of this process."""
    for name, value in {
        "HF_ENDPOINT": filled.endpoint,
        "HF_HUB_OFFLINE": False,
        "HF_DATASETS_CACHE": tmp_path / "datasets-cache",
        "USE_PARQUET_EXPORT": False,  # it is asked of another host
        "HF_UPDATE_DOWNLOAD_COUNTS": False,
    }.items():
        monkeypatch.setattr(datasets_config, name, value)
    return filled


@pytest.fixture
def hf_dp_train(filled: Hub, tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """`hf-dp train` in a process of its own, with nothing on this machine but the recipes, and a home that is new."""

    def run(recipe: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", "from hf_dp.cli import app; app()", "train"]
        settings = [str(ROOT / "recipes" / f"{recipe}.yaml"), "--smoke", "true", "--use_cpu", "true"]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        at_home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": filled.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"}
        # A client asks a host datasets-server.127.0.0.1, which nobody knows; that should take no time.
        others = {"PYTHONPATH": str(ROOT), "RES_OPTIONS": "timeout:1 attempts:1", "COLUMNS": "200", "NO_COLOR": "1"}
        command = [*program, *settings, "--output_dir", str(tmp_path / "out"), *flags]
        env = {**inherited, **at_home, **others, **environment}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return run


def steps(out: Path) -> int:
    return int(json.loads((out / "privacy.json").read_text(encoding="utf-8"))["report"]["steps"])


# --- as a user runs them ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("then_offline", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_private_data_and_model_with_a_token_and_then_offline(then_offline, hf_dp_train, filled, tmp_path):
    done = hf_dp_train("classify", *PRIVATE, HF_TOKEN=READER)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "labels: the 3 names that someone/private-questions declares" in done.stdout
    assert steps(tmp_path / "out") == 2
    if not then_offline:
        return
    filled.requests.clear()
    done = hf_dp_train("classify_lora", *PRIVATE, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not filled.requests


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def local(named: Hub, tmp_path: Path) -> Callable[[str], list[str]]:
    """The names on the hub that a recipe reads, for the fixture `train`."""
    talk = [{"role": "user", "content": "my card"}, {"role": "assistant", "content": "was lost"}]
    chats = {f"{split}.parquet": as_parquet([{"messages": talk * (1 + i % 2)} for i in range(24)])
             for split in ("train", "test")}  # fmt: skip
    named.publish("datasets/someone/chats", chats)
    (tmp_path / "template.jinja").write_text(TEMPLATE, encoding="utf-8")

    def flags(recipe: str) -> list[str]:
        if recipe == "classify":
            return PRIVATE
        if recipe == "classify_as_infilling":
            return [*PUBLIC, "--model", "someone/masked", "--labels_file", ""]
        if recipe == "causal_lm":
            return ["--model", "someone/causal", "--text_file", "someone/questions", "--prompt", "my card"]
        template = ["--chat_template", str(tmp_path / "template.jinja"), "--max_new_tokens", "4"]
        return ["--model", "someone/causal", "--train_file=someone/chats", "--test_file=someone/chats", *template]

    return flags


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["causal_lm", "classify_as_infilling", "instruct"],
)
def test_other_recipes_by_name(recipe, train):  # noqa: F811
    _, out = train(recipe, "--smoke", "true")
    assert steps(out) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "no folder 'someone/private-questions', and no data set of that name"),
        (("--labels_file", "LABELS"), "no folder 'someone/private-encoder', and no model of that name"),
        (("--encoder", "someone/masked"), "no folder 'someone/private-questions', and no data set of that name"),
        (
            ("--labels_file", "LABELS", "--encoder", "someone/nothing"),
            "no folder 'someone/nothing', and no model of that",
        ),
    ],
)
def test_what_no_token_opens_is_refused_before_training(flags, words, train, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.delenv("HF_TOKEN")
    (labels := tmp_path / "labels.json").write_text('["one", "two"]')
    printed, out = train("classify", *(str(labels) if flag == "LABELS" else flag for flag in flags), code=2)
    assert words in printed
    assert "What to do: check the name" in printed
    assert "give a file or folder of your own in its place" in " ".join(printed.split())
    assert not out.exists()


@pytest.mark.slow
def test_rows_by_name_and_of_a_directory(named, part, tmp_path):
    read_rows = part("common.data").read_rows
    rows = read_rows("someone/questions", split="train", columns=("text", "label"))
    assert rows == [{**row, "label": LABELS[row["label"]]} for row in questions(60)]
    assert len(read_rows("someone/private-questions", split="train", columns=())) == 60
    assert len(read_rows("someone/questions", split="train", columns=(), max_examples=7)) == 7
    asked = len(named.requests)
    assert len(read_rows("someone/questions", split="test", columns=())) == 12
    assert len(named.requests) == asked
    for name, body in named.repositories["datasets/someone/questions"].files.items():
        (tmp_path / name).write_bytes(body)
    assert read_rows(f"{tmp_path}", split="train", columns=()) == rows


@pytest.mark.slow
def test_a_split_or_configuration_is_named_after_a_colon(named, part):
    read_rows = part("common.data").read_rows
    files = {f"{name}.csv": as_csv(questions(n)) for name, n in (("long", 9), ("short", 3))}
    configs = [{"config_name": file[:-4], "data_files": [{"split": "validation", "path": file}]} for file in files]
    card = f"---\nconfigs: {json.dumps(configs)}\n---\n".encode()
    named.publish("datasets/someone/two", {"README.md": card, **files})
    with pytest.raises(ConfigurationError, match="(?s)'long', 'short'.*NAME:CONFIGURATION") as found:
        read_rows("someone/two", split="train", columns=())
    assert "\n  What to do:" in str(found.value)
    with pytest.raises(ConfigurationError, match=r"(?s)\(it has validation\).*someone/two:long:valid"):
        read_rows("someone/two:long", split="train", columns=())
    assert len(read_rows("someone/two:long:validation", split="train", columns=())) == 9
    assert len(read_rows("someone/two:short:validation", split="train", columns=())) == 3
    assert len(read_rows("someone/questions::test", split="train", columns=())) == 12


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/nothing", "DatasetNotFoundError"),
        ("no such name", r"^there is no folder 'no such name'\."),
        ("someone/questions:other", "'other' not found"),
        ("someone/questions::dev", r"no split 'dev' \(it has train, test\)"),
        ("../data/none.tsv", "cannot be read"),
        ("", r"^there is no folder ''\."),
        ("someone/empty", "no data set of that name can be read"),
        ("someone/broken", "no data set of that name can be read"),
        ("someone/script", "scripts are no longer supported"),
    ],
)
def test_data_that_cannot_be_read_is_refused(name, words, named, part):
    named.publish("datasets/someone/empty", {".gitattributes": b""})
    named.publish("datasets/someone/broken", {"train.jsonl": b'{"text": "a"}\n{"text": ', "test.jsonl": b"[]"})
    named.publish("datasets/someone/script", {"script.py": b"", "train.csv": b"a\n1\n"})
    with pytest.raises(ConfigurationError, match=words):
        part("common.data").read_rows(name, split="train", columns=("text",))


@pytest.mark.parametrize("failure", [500, 401, "drop", "nobody is there"])
@pytest.mark.slow
def test_a_hub_that_fails_is_said(failure, named, part):
    loading = part("common.hub_names")
    named.fail = lambda method, path: failure
    if failure == "nobody is there":
        named.close()
    with pytest.raises(ConfigurationError, match="no folder 'someone/causal', and no model of that name can be read"):
        loading.pretrained(AutoTokenizer, "someone/causal")
    with pytest.raises(ConfigurationError, match="no folder 'someone/questions', and no data set of that name can be"):
        loading.split_of("someone/questions", "train")


def test_offline_without_a_cache_is_said(named, part, monkeypatch):
    loading = part("common.hub_names")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", True)
    for read in (lambda name: loading.pretrained(AutoTokenizer, name), lambda name: loading.split_of(name, "train")):
        with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE=1"):
            read("someone/questions")
    assert not named.requests


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(part) -> Callable[..., Any]:
    """Arguments of a recipe that classifies, and the module that reads its data."""
    data = part("common.data")
    return lambda name, **changes: (data, data.LabelledData(train_file=name, test_file=name, **changes))


def test_labels_are_those_that_the_data_set_declares(named, recipe):
    for name in ("someone/questions", "someone/private-questions"):
        data, asked = recipe(name, label_column="label")
        names = data.public_labels(asked)
        assert names == LABELS
        assert data.labelled(name, "test", asked, names)["labels"] == [row["label"] for row in questions(12)]
    data, asked = recipe("someone/questions", label_column="text")
    with pytest.raises(ConfigurationError, match="declares no names for the column 'text'"):
        data.public_labels(asked)
    data, asked = recipe("questions.csv")  # whose column of labels is not known before it is read
    with pytest.raises(ConfigurationError, match=r"questions\.csv is a file, which declares no names\."):
        data.public_labels(asked)


@pytest.mark.slow
def test_labels_that_are_numbers_and_rows_without_one(named, recipe, tmp_path):
    (tmp_path / "labels.json").write_text("[0, 1, 2]", encoding="utf-8")
    named.publish("datasets/someone/numbers", {"train.csv": as_csv(questions(6))})
    data, asked = recipe("someone/numbers", label_column="label", labels_file=str(tmp_path / "labels.json"))
    assert data.labelled("someone/numbers", "train", asked, data.public_labels(asked))["labels"] == [0, 1, 2] * 2
    kinds = Features({"text": Value("string"), "label": ClassLabel(names=LABELS)})
    for name, unlabelled in (("someone/contest", -1), ("someone/survey", None)):
        rows = [*questions(3), {"text": "my card", "label": unlabelled}]
        named.publish(f"datasets/{name}", {"test.parquet": as_parquet(rows, kinds)})
        with pytest.raises(ConfigurationError, match="has nothing in column 'label' of row 3"):
            data.labelled(name, "test", recipe(name, label_column="label")[1], LABELS)


def test_rows_that_no_model_can_read_are_refused(recipe, tmp_path):
    file = tmp_path / "a.jsonl"
    data, asked = recipe(str(file), label_column="label")
    for line, words in {
        '{"text": null, "label": "top_up"}': "has nothing in column 'text' of row 1",
        '{"label": "top_up"}': "has nothing in column 'text' of row 1",
        '{"text": 3, "label": "top_up"}': "has int in column 'text' of row 1",
        '{"text": ': "cannot be read",
        "[1]": "row 1 .counted from 0., which has no columns",
    }.items():
        file.write_text(f'{{"text": "my card", "label": "top_up"}}\n{line}\n', encoding="utf-8")
        with pytest.raises(ConfigurationError, match=words):
            data.labelled(str(file), "train", asked, LABELS)


@pytest.mark.slow
def test_nothing_goes_up_in_a_form_that_only_the_recipe_loads(train, hub):  # noqa: F811
    flags = ("--save_strategy", "steps", "--save_steps", "1", "--push_to_hub", "true", "--hub_always_push", "true")
    strategy = ("--hub_model_id", "someone/classifier", "--hub_strategy", "every_save")
    printed, _ = train("classify", "--smoke", "true", *flags, *strategy)
    assert "Pushed when it has ended" in printed
    commits = [files for _, _, files in hub.repositories["someone/classifier"].commits if "config.json" in files]
    kinds = [json.loads(files["config.json"])["architectures"] for files in commits]
    assert kinds == [["BertForSequenceClassification"]]
    assert "## How to use it" in commits[-1]["README.md"].decode()
