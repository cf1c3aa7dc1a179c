"""Recipes that train on answers: chats and descriptions of tables, on tiny local models and data."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer, DataCollatorForSeq2Seq
from typer.testing import CliRunner

from hf_dp.cli import app
from hf_dp.errors import ConfigurationError
from tests.recipes.conftest import TEMPLATE, WORDS
from tests.recipes.running import ROOT
from tests.training.workbench import a_chat_tokenizer

pytestmark = pytest.mark.usefixtures("checked_once")


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
        choices = [{"prompt": said(), "chosen": f" {said()}", "rejected": f" {said()}"} for _ in range(n)]
        (path / f"preferences_{split}.json").write_text(json.dumps(choices), encoding="utf-8")
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
        forms = {
            "table_to_text": ("tables", "csv"),
            "table_to_text_lora": ("tables", "csv"),
            "preferences": ("preferences", "json"),
        }
        kind, ending = forms.get(recipe, ("chats", "jsonl"))
        found = [f"--{split}_file={data}/{kind}_{split}.{ending}" for split in ("train", "test")]
        template = [] if recipe in forms else ["--chat_template", str(data / "template.jinja")]
        most = [] if recipe == "preferences" else ["--max_new_tokens", "8"]
        return [*found, *template, "--model", str(causal_directory), *most]

    return flags


@pytest.fixture
def instruct(part):
    """The module of the recipe `instruct`."""
    return part("instruct")


@pytest.mark.parametrize(
    ("recipe", "group", "method"),
    [("instruct", "branch", "lora"), ("table_to_text", "fee", "full")],
)
@pytest.mark.slow
def test_smoke_by_group(recipe, group, method, train):
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


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("recipe", ["instruct", "table_to_text", "preferences"])
def test_too_few_rows_are_refused_before_the_model_is_loaded(recipe, train):
    printed, _ = train(recipe, "--per_device_train_batch_size", "500", "--max_examples", "40", code=2)
    assert "an expected batch of " in printed
    assert "from a training dataset of " in printed


@pytest.mark.slow
def test_a_model_from_scratch_learns_to_describe(train):
    flags = ("--model", "scratch", "--method", "full", "--width", "32", "--layers", "1", "--samples", "3")
    _, out = train("table_to_text", "--smoke", "true", *flags, "--max_steps", "20", "--target_epsilon", "1000")
    before, after = json.loads((out / "results.json").read_text(encoding="utf-8")).values()
    assert after["loss per target token"] < before["loss per target token"] - 0.3


@pytest.mark.slow
def test_results_are_there_before_a_comparison_begins_and_samples_stand_side_by_side(train, part, monkeypatch):
    results = part("common.results")
    begun, rates = [], []

    class Ordinary(results.Trainer):
        def train(self, *_, **__):
            written = Path(self.args.output_dir).parent / "results.json"
            begun.append([*json.loads(written.read_text(encoding="utf-8"))])
            rates.append(self.args.learning_rate)

    monkeypatch.setattr(results, "Trainer", Ordinary)
    few = ("--max_test_examples", "5", "--group_column", "fee", "--bf16", "true", "--samples", "4")
    own = ("--compare_without_privacy", "true", "--comparison_learning_rate", "0.03125")
    printed, out = train("table_to_text_lora", "--smoke", "true", *own, *few)
    assert rates == [0.03125]
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
    common, small = part("common.base_models"), part("common.language_models")
    model = small.small_gpt2(small.characters(), positions=8, width=32, layers=3)
    found = common.adapters(model, rank=2, layers=last)
    names = [name for name, p in found.named_parameters() if p.requires_grad]
    assert {int(re.search(r"\d+", name)[0]) for name in names} == adapted
    assert len(names) == 2 * 4 * len(adapted), "A and B of each linear layer"


def test_layers_that_have_no_numbers_are_not_all_adapted(part):
    common, small = part("common.base_models"), part("common.language_models")
    model = small.small_gpt2(small.characters(), positions=8, width=32, layers=2)
    model.transformer2 = model.transformer
    del model.transformer
    with pytest.raises(ConfigurationError, match="begins with the number of a layer"):
        common.adapters(model, rank=2, layers=1)


@pytest.mark.slow
def test_prompts_and_completions(data, train):
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
        ("table_to_text", ("--lora_layers", "3"), "--lora_layers 3 with --method full"),
        ("table_to_text", ("--model", "scratch", "--method", "lora"), "--method lora with --model scratch"),
    ],
)
def test_refusals(recipe, flags, words, train):
    printed, out = train(recipe, *flags, code=2)
    assert words in " ".join(printed.split())
    assert not (out / "privacy.json").exists()


def test_a_tokenizer_without_a_template(data, causal_directory, train, local, monkeypatch):
    without = [flag for flag in local("instruct") if "template" not in flag]
    monkeypatch.setattr("sys.argv", ["unused"])
    out = data / "refused"
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


CONVERSATION = [
    {"role": "user", "content": "Hi, I'm Ada.\n"},
    {"role": "assistant", "content": "Hello Ada!"},
    {"role": "user", "content": "Name  two fruits: not <apples>"},
    {"role": "assistant", "content": "- a pear \n- a fig: 20 %"},
    {"role": "user", "content": "And a third?"},
    {"role": "assistant", "content": "A plum."},
    {"role": "user", "content": "Thanks, bye."},
]


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.data)])
def chat_tokenizer(request):
    """A tiny one with a template as real ones have it, and a real one where it is present."""
    if request.param == "tiny":
        return a_chat_tokenizer()
    return AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2_directory"))


def test_what_is_trained_of_a_conversation_decoded(instruct, chat_tokenizer):
    """Each answer and its end, after the very tokens that it is asked with; padding is no end of a turn."""
    rows = [
        instruct.encoded({"messages": messages}, chat_tokenizer)
        for messages in (
            CONVERSATION,
            CONVERSATION[:2],
            [{"role": "system", "content": "Be brief."}, *CONVERSATION[:4]],
        )
    ]
    batch = DataCollatorForSeq2Seq(chat_tokenizer)([dict(row) for row in rows])
    end = chat_tokenizer.eos_token
    for labels, ids, row, count in zip(batch["labels"], batch["input_ids"], rows, (3, 1, 2), strict=True):
        assert torch.equal(labels[labels.ne(-100)], ids[labels.ne(-100)])
        said = chat_tokenizer.decode(labels[labels.ne(-100)])
        assert said == "".join(CONVERSATION[2 * i + 1]["content"] + end for i in range(count))
        assert batch["attention_mask"].sum(1).max() == len(rows[0]["input_ids"])
        assert labels[len(row["labels"]) :].eq(-100).all()
    asked = chat_tokenizer.apply_chat_template(CONVERSATION[:5], tokenize=False, add_generation_prompt=True)
    prompt = chat_tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert rows[0]["input_ids"][: len(prompt)] == prompt
    assert chat_tokenizer.decode(rows[0]["labels"][len(prompt) :]) == "A plum." + end


def test_an_answer_that_is_cut_off_is_trained_as_far_as_it_goes_and_said(instruct, chat_tokenizer, capsys):
    rows = [{"messages": CONVERSATION}]
    (row,) = instruct.encode_all(rows, "a.jsonl", chat_tokenizer, SimpleNamespace(max_length=512))
    assert not capsys.readouterr().out
    first = next(i for i, label in enumerate(row["labels"]) if label != -100)
    (cut,) = instruct.encode_all(rows, "a.jsonl", chat_tokenizer, SimpleNamespace(max_length=first + 2))
    assert cut["labels"] == [-100] * first + row["labels"][first : first + 2]
    assert f"a.jsonl: 1 of 1 rows are cut off after {first + 2} tokens" in capsys.readouterr().out


def test_a_template_that_changes_what_it_rendered_before(instruct, causal_directory):
    tokenizer = AutoTokenizer.from_pretrained(causal_directory)
    tokenizer.chat_template = TEMPLATE.replace("m.role +", "(m.role if loop.last else m.role|upper) +")
    messages = [{"role": role, "content": "it"} for role in ("user", "assistant", "user", "assistant")]
    with pytest.raises(ConfigurationError, match="in another way than the whole"):
        instruct.rendered(messages, 0, tokenizer)


@pytest.mark.slow
@pytest.mark.data
def test_a_real_model_learns_conversations_through_its_own_template(data, smollm2_directory, run, tmp_path):
    files = [f"--{split}_file={data}/chats_{split}.jsonl" for split in ("train", "test")]
    flags = ("--model", str(smollm2_directory), "--target_epsilon", "1000", "--max_new_tokens", "8", "--samples", "1")
    printed = run("instruct", "--smoke", "true", *files, *flags, "--output_dir", str(tmp_path / "out"))
    before, after = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8")).values()
    assert after["loss per target token"] < before["loss per target token"]
    assert "<|im_start|>assistant" in printed
    found = CliRunner().invoke(app, ["verify", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.slow
def test_preferences_before_and_after(method, local, part, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    preset = yaml.safe_load((ROOT / "recipes" / "preferences.yaml").read_text(encoding="utf-8"))
    del preset["lora_layers"], preset["bf16"]  # which go with adapters alone
    (tmp_path / "all_layers.yaml").write_text(yaml.safe_dump(preset), encoding="utf-8")
    out = tmp_path / "out"
    flags = ("--smoke", "true", "--method", method, "--output_dir", str(out), "--use_cpu", "True")
    monkeypatch.setattr(
        "sys.argv", ["preferences.py", str(tmp_path / "all_layers.yaml"), *local("preferences"), *flags]
    )
    part("preferences").main()
    assert not (out / "ref").exists(), "TRL's copy of adapters lies beside the trained ones"
    assert json.loads((out / "privacy.json").read_text(encoding="utf-8"))["report"]["dataset_size"] == 64
    before, after = json.loads((out / "results.json").read_text(encoding="utf-8")).values()
    assert before["share with gain"] == 0.5
    # What two steps gain is their noise, which may come to little.
    assert abs(before["gain in nats"]) < 1e-3
    assert abs(after["gain in nats"] - before["gain in nats"]) > 1e-7
    words = len(AutoTokenizer.from_pretrained(str(out)))  # of which a random model takes each for as likely
    assert before["loss of the chosen, nats a token"] == pytest.approx(math.log(words), abs=0.5)


def test_a_reference_that_other_processes_would_not_find(train, part, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr(part("common.arguments").TrainingArguments, "world_size", 2)
    printed, _ = train("preferences", "--method", "full", code=2)
    assert "--method full in 2 processes" in printed


def test_an_average_would_take_the_place_of_the_best_model(train):
    saved = ("--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1")
    printed, _ = train(
        "instruct", "--smoke", "true", "--average", "0.5", "--load_best_model_at_end", "true", *saved, code=2
    )
    assert "--average 0.5 with --load_best_model_at_end" in printed


def test_a_description_is_corrupted_by_its_own_row_and_public_values(part):
    recipe = part("preferences")
    table = "name[The Mill], food[Italian], area[riverside], near[Café Rouge]"
    text = "The Mill by the Riverside serves italian food near Café Rouge."
    found = {recipe.corrupted(table, text + " " * i) for i in range(60)}
    assert {wrong.strip() for wrong in found} == {
        "Café Rouge by the Riverside serves italian food near The Mill.",
        "The Mill by the city centre serves italian food near Café Rouge.",
        *(f"The Mill by the Riverside serves {food} food near Café Rouge." for food in recipe.VALUES["food"][:-2]),
        "The Mill by the Riverside serves Japanese food near Café Rouge.",
    }
    assert recipe.corrupted(table, text) == recipe.corrupted(table, text)
    assert recipe.corrupted(table, "A place to eat.") is None
    assert recipe.slots(table) == {"name": "The Mill", "food": "Italian", "area": "riverside", "near": "Café Rouge"}


@pytest.mark.slow
@pytest.mark.data
def test_table_to_text_on_restaurants(run, data_directory, tmp_path):
    tables = data_directory / "e2e_nlg"
    files = ("--train_file", str(tables / "devset.csv"), "--test_file", str(tables / "testset_w_refs.csv"))
    printed = run("table_to_text", "--smoke", "true", *files, "--output_dir", str(tmp_path / "out"), "--samples", "2")
    assert "slot coverage" in printed
