"""Tiny local models and data for recipes: what a hub name or a real file would give, in kilobytes."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from tempfile import gettempdir

import pytest
import yaml
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from tests.recipes.running import ROOT, called

WORDS = ["my", "card", "was", "lost", "declined", "cash", "fee", "top", "up", "transfer", "it", "is", "about", "why"]
LABELS = ["card_lost", "cash_fee", "top_up"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + ' _\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*"abcdefghijklmnopqrstuvwxyz.,:?_"]
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *sorted({*WORDS} - {*letters})]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", eos_token="[SEP]", **names)


@pytest.fixture(scope="session")
def masked_directory(tmp_path_factory) -> Path:
    """A random BERT with a masked language modelling head, and its tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("masked"), _tokenizer()
    set_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    model.cls.predictions.bias.data.normal_()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def encoder_directory(masked_directory, tmp_path_factory) -> Path:
    """The same encoder without that head."""
    path = tmp_path_factory.mktemp("encoder")
    BertForMaskedLM.from_pretrained(masked_directory).bert.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def causal_directory(tmp_path_factory) -> Path:
    """A random GPT-2 and its tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("causal"), _tokenizer()
    set_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_embd=32, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3
    )
    GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def questions_directory(tmp_path_factory) -> Path:
    """train.csv and test.csv of bank questions with a label and a branch, categories.json, plays.txt, and a template
    for chats."""
    path, draw = tmp_path_factory.mktemp("questions"), random.Random(0)
    for name, n in (("train", 90), ("test", 30)):
        with (path / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label", "branch"])
            for i in range(n):
                label = LABELS[i % 3]
                words = [*draw.choices(WORDS, k=draw.randint(2, 8)), *label.split("_")]
                writer.writerow([" ".join(words) + "?", label, "north" if i % 5 else "south"])
    (path / "categories.json").write_text(json.dumps(LABELS), encoding="utf-8")
    lines = [" ".join(draw.choices(WORDS, k=9)) + ".\n" for _ in range(400)]
    (path / "plays.txt").write_text("".join(lines), encoding="utf-8")
    (path / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture
def local(masked_directory, encoder_directory, causal_directory, questions_directory):
    """For a recipe, the flags that make it read local models and data, by the names that its YAML file has."""

    def flags(recipe: str) -> list[str]:
        masked = recipe == "classify_as_infilling"
        known = {
            "encoder": encoder_directory,
            "model": masked_directory if masked else causal_directory,
            "train_file": questions_directory / "train.csv",
            "test_file": questions_directory / "test.csv",
            "labels_file": questions_directory / "categories.json",
            "text_file": questions_directory / "plays.txt",
        }
        settings = yaml.safe_load((ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
        if recipe == "classify_as_answers":
            settings["chat_template"] = known["chat_template"] = questions_directory / "template.jinja"
        return [part for name, value in known.items() if name in settings for part in (f"--{name}", str(value))]

    return flags


@pytest.fixture
def train(local, forgotten, tmp_path, monkeypatch):
    """Runs a recipe as `hf-dp train` does; what it printed, and its output directory."""
    monkeypatch.chdir(tmp_path)  # no file of the real data is found by chance

    def run(recipe: str, *flags: str, code: int = 0) -> tuple[str, Path]:
        out = tmp_path / "out"
        return called(recipe, *local(recipe), "--output_dir", str(out), *flags, code=code), out

    return run


@pytest.fixture
def no_model(monkeypatch):
    """None can be loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)


@pytest.fixture
def run(forgotten, monkeypatch):
    """`called` from elsewhere, with no data but those that flags name."""
    monkeypatch.chdir(gettempdir())
    return called
