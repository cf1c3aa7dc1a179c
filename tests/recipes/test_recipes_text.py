"""Recipes that train on answers: chats and descriptions of tables, on tiny local models and data."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_dp.errors import ConfigurationError
from tests.recipes.conftest import WORDS
from tests.recipes.test_recipes import ROOT, run, train  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("checked_once")

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + ' _\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Chats, prompts with completions, and tables with descriptions, a training and a test file of each."""
    path, draw = tmp_path_factory.mktemp("answers"), random.Random(0)

    def said() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 6)))

    for split, n in (("train", 70), ("test", 12)):
        chats = [
            {
                "messages": [{"role": r, "content": said()} for r in ["user", "assistant"] * draw.randint(1, 2)],
                "branch": "north" if i % 3 else "south",
            }
            for i in range(n)
        ]
        lines = "".join(json.dumps(chat) + "\n" for chat in chats)
        (path / f"chats_{split}.jsonl").write_text(lines, encoding="utf-8")
        pairs = [{"prompt": said(), "completion": said()} for _ in range(n)]
        (path / f"pairs_{split}.json").write_text(json.dumps(pairs), encoding="utf-8")
        tables = [f'"name[{WORDS[i % 9]}], fee[{"top" if i % 3 else "up"}]",{said()}\n' for i in range(n)]
        (path / f"tables_{split}.csv").write_text("mr,ref\n" + "".join(tables), encoding="utf-8")
    (path / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture
def local(data, causal_directory):
    """For a recipe, the flags that make it read these, for the fixture `train`."""

    def flags(recipe: str) -> list[str]:
        kind, ending = ("tables", "csv") if recipe.startswith("table_to_text") else ("chats", "jsonl")
        found = [f"--{split}_file={data}/{kind}_{split}.{ending}" for split in ("train", "test")]
        template = [] if kind == "tables" else ["--chat_template", str(data / "template.jinja")]
        return [*found, *template, "--model", str(causal_directory), "--max_new_tokens", "8"]

    return flags


@pytest.fixture
def instruct(part):
    """The module of the recipe `instruct`."""
    return part("instruct")


@pytest.mark.parametrize(
    ("recipe", "group", "method"), [("instruct", "branch", "lora"), ("table_to_text", "fee", "full")]
)
def test_smoke_by_group(recipe, group, method, train):  # noqa: F811
    printed, out = train(recipe, "--smoke", "true", "--group_column", group, "--method", method)
    assert json.loads((out / "privacy.json").read_text(encoding="utf-8"))["report"]["steps"] == 2
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    expected = {"loss", "perplexity", "loss per target token"}
    if recipe == "table_to_text":
        expected |= {"bleu", "rouge_l", "slot_coverage"}
    assert all(scores.keys() == expected for scores in results.values())
    groups = json.loads((out / "groups.json").read_text(encoding="utf-8"))["groups"]
    assert {row["group"] for row in groups} == ({"north", "south"} if recipe == "instruct" else {"top", "up"})
    assert (out / ("adapter_model.safetensors" if method == "lora" else "model.safetensors")).exists()
    assert "loss per target token" in printed


def test_a_model_from_scratch_learns_to_describe(train):  # noqa: F811
    flags = ("--model", "scratch", "--method", "full", "--width", "32", "--layers", "1", "--samples", "3")
    _, out = train("table_to_text", "--smoke", "true", *flags, "--max_steps", "20", "--target_epsilon", "1000")
    before, after = json.loads((out / "results.json").read_text(encoding="utf-8")).values()
    assert after["loss per target token"] < before["loss per target token"] - 0.3


def test_results_are_there_before_a_comparison_begins_and_samples_stand_side_by_side(train, part, monkeypatch):  # noqa: F811
    results = part("common.results")
    begun = []

    class Ordinary(results.Trainer):
        def train(self, *_, **__):
            written = Path(self.args.output_dir).parent / "results.json"
            begun.append([*json.loads(written.read_text(encoding="utf-8"))])

    monkeypatch.setattr(results, "Trainer", Ordinary)
    few = ("--max_test_examples", "5", "--group_column", "fee", "--bf16", "true", "--samples", "4")
    printed, out = train("table_to_text_lora", "--smoke", "true", "--compare_without_privacy", "true", *few)
    assert begun == [["before", "epsilon 8"]]
    assert [*json.loads((out / "results.json").read_text(encoding="utf-8"))] == [*begun[0], "without privacy"]
    groups = json.loads((out / "groups.json").read_text(encoding="utf-8"))["groups"]
    assert sum(row["n"] for row in groups) == 5
    for name in ("before", "epsilon 8", "without privacy"):
        assert printed.count(f"    {name}: ") == 3
    saved = load_file(out / "adapter_model.safetensors").values()
    assert {value.dtype for value in saved} == {torch.float32}, "what is trained is never kept in 16 bits"


@pytest.mark.parametrize(("last", "adapted"), [(None, {0, 1, 2}), (2, {1, 2}), (9, {0, 1, 2})])
def test_adapters_in_the_last_layers(last, adapted, part):
    common, small = part("common.answers"), part("common.language_models")
    model = small.small_gpt2(small.characters(), positions=8, width=32, layers=3)
    found = common.adapters(model, rank=2, layers=last)
    names = [name for name, p in found.named_parameters() if p.requires_grad]
    assert {int(re.search(r"\d+", name)[0]) for name in names} == adapted
    assert len(names) == 2 * 4 * len(adapted), "A and B of each linear layer"


def test_layers_that_have_no_numbers_are_not_all_adapted(part):
    common, small = part("common.answers"), part("common.language_models")
    model = small.small_gpt2(small.characters(), positions=8, width=32, layers=2)
    model.transformer2 = model.transformer
    del model.transformer
    with pytest.raises(ConfigurationError, match="begins with the number of a layer"):
        common.adapters(model, rank=2, layers=1)


def test_prompts_and_completions(data, train):  # noqa: F811
    files = [f"--{split}_file={data}/pairs_{split}.json" for split in ("train", "test")]
    _, out = train("instruct", "--smoke", "true", *files, "--group_column", "prompt", "--method", "full")
    assert (out / "groups.json").exists()


@pytest.mark.parametrize(
    ("recipe", "flags", "words"),
    [
        ("instruct", ("--max_length", "2"), "has a token of an answer"),
        ("table_to_text", ("--group_column", "branch"), "neither a column of"),
        ("table_to_text", ("--table_column", "table"), "no column 'table'"),
        ("table_to_text", ("--prompt", "What is it?"), "it has no {table}"),
        ("table_to_text_lora", ("--method", "full"), "--lora_layers 15 with --method full"),
        ("table_to_text", ("--model", "scratch", "--method", "lora"), "--method lora with --model scratch"),
    ],
)
def test_refusals(recipe, flags, words, train):  # noqa: F811
    printed, out = train(recipe, *flags, code=2)
    assert words in " ".join(printed.split())
    assert not (out / "privacy.json").exists()


def test_a_tokenizer_without_a_template(data, causal_directory, train, local, monkeypatch):  # noqa: F811
    without = [flag for flag in local("instruct") if "template" not in flag]
    monkeypatch.setattr("sys.argv", ["unused"])
    out = data / "refused"
    from typer.testing import CliRunner

    from hf_dp.cli import app

    words = ["train", str(ROOT / "recipes" / "instruct.yaml"), *without, "--output_dir", str(out), "--use_cpu", "True"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert done.exit_code == 2
    assert "has no chat template" in done.output


@pytest.mark.parametrize("first", [0, 3])
def test_answers_alone_are_learnt(first, instruct, causal_directory):
    tokenizer = AutoTokenizer.from_pretrained(causal_directory)
    tokenizer.chat_template = TEMPLATE
    messages = [
        {"role": "user", "content": "my card"},
        {"role": "assistant", "content": "was lost"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "cash fee"},
        {"role": "user", "content": "top up"},
    ]
    parts = instruct.rendered(messages, first, tokenizer)
    whole = tokenizer.apply_chat_template(messages[:4], tokenize=False)
    assert "".join(text for text, _ in parts) == whole.rstrip()
    assert [text for text, is_answer in parts if is_answer] == ["was lost _", "cash fee _"][1 if first else 0 :]


def test_a_template_that_changes_what_it_rendered_before(instruct, causal_directory):
    tokenizer = AutoTokenizer.from_pretrained(causal_directory)
    tokenizer.chat_template = TEMPLATE.replace("m.role +", "(m.role if loop.last else m.role|upper) +")
    messages = [{"role": role, "content": "it"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(ConfigurationError, match="in another way than the whole"):
        instruct.rendered(messages, 0, tokenizer)


@pytest.mark.data
def test_table_to_text_on_restaurants(run, data_directory, tmp_path):  # noqa: F811
    tables = data_directory / "e2e_nlg"
    files = ("--train_file", str(tables / "devset.csv"), "--test_file", str(tables / "testset_w_refs.csv"))
    printed = run("table_to_text", "--smoke", "true", *files, "--output_dir", str(tmp_path / "out"), "--samples", "2")
    assert "slot coverage" in printed
