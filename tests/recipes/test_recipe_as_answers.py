"""Classification as answering: what is learnt is the label's words, and what is said is always one of the labels."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_dp.errors import ConfigurationError
from tests.recipes.conftest import LABELS, TEMPLATE
from tests.recipes.running import accuracies

pytestmark = pytest.mark.usefixtures("checked_once")

WORDS = ["card lost", "card fee", "card", "top up", "top it up"]


@pytest.fixture
def recipe(part):
    """The module of the recipe."""
    return part("classify_as_answers")


@pytest.fixture
def arguments(recipe, causal_directory, questions_directory):
    def made(**changes):
        files = {f"{split}_file": str(questions_directory / f"{split}.csv") for split in ("train", "test")}
        labels = {"labels_file": str(questions_directory / "categories.json")}
        return recipe.RecipeArguments(model=str(causal_directory), **{**files, **labels, **changes})

    return made


@pytest.fixture
def tokenizer(causal_directory):
    found = AutoTokenizer.from_pretrained(causal_directory)
    found.chat_template = TEMPLATE
    return found


@pytest.mark.slow
def test_the_likeliest_way_through_the_labels_is_taken_row_by_row(
    recipe, part, arguments, tokenizer, causal_directory, tmp_path
):
    """Against one row at a time, without padding and without generate; a random model left alone says no label."""
    results = part("common.results")
    set_seed(1)
    model = AutoModelForCausalLM.from_pretrained(causal_directory)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    settings = results.TrainingArguments(str(tmp_path), use_cpu=True, per_device_eval_batch_size=3, report_to="none")
    trainer = results.Trainer(model, settings, processing_class=tokenizer)
    said = recipe.answers(WORDS, tokenizer, arguments())
    questions = recipe.read(arguments().test_file, "test", arguments(), tokenizer, LABELS, 4)

    def alone(ids):
        left, at = list(range(len(said))), 0
        while True:
            with torch.no_grad():
                logits = model.eval()(torch.tensor([ids])).logits[0, -1]
            token = max({said[i][at] for i in left}, key=lambda token: float(logits[token]))
            left, at, ids = [i for i in left if said[i][at] == token], at + 1, [*ids, token]
            if len(left) == 1:
                return left[0]

    found = recipe.chosen(trainer, tokenizer, questions.prompts, said)
    assert found == [alone(ids) for ids in questions.prompts]
    assert len(set(found)) > 2
    free = part("common.answers").generated(trainer, tokenizer, questions.prompts[:4], 4)
    assert all(ids[: len(answer)] != answer for ids in free for answer in said)


@pytest.mark.parametrize("system", [None, "why is it"])
def test_what_is_learnt_is_the_labels_words_and_long_texts_are_cut_before_them(
    system, recipe, arguments, tokenizer, tmp_path
):
    path = tmp_path / "long.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "category"), *((text, "top_up") for text in ("my card " * 50, "it", ""))])
    given = arguments(system=system, max_length=40)
    words = [name.replace("_", " ") for name in LABELS]
    said = recipe.answers(words, tokenizer, given)
    questions = recipe.read(str(path), "train", given, tokenizer, LABELS, max(map(len, said)))
    rows = [recipe.example(prompt, said[2]) for prompt in questions.prompts]
    assert max(len(row["input_ids"]) for row in rows) == 40
    assert questions.texts[1:] == ["it", ""]
    for text, row in zip(questions.texts, rows, strict=True):
        turns = recipe.asked(text, given)
        assert [turn["role"] for turn in turns] == ["system", "user"][system is None :]
        whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "top up"}], tokenize=False)
        assert row["input_ids"] == tokenizer(whole.rstrip(), add_special_tokens=False)["input_ids"]
        learnt = [label for label in row["labels"] if label != -100]
        assert tokenizer.decode(learnt) == f"{words[2]} _"
        assert row["labels"][-len(learnt) :] == learnt


def test_refusals(recipe, arguments, tokenizer):
    tokenizer.chat_template = TEMPLATE.replace(" _", "")
    with pytest.raises(ConfigurationError, match="the answer 'card fee' begins as all of 'card' does"):
        recipe.answers(WORDS, tokenizer, arguments())
    with pytest.raises(ConfigurationError, match="begins as all of 'top up' does"):
        recipe.answers(["top up", "card", "top up"], tokenizer, arguments())
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE
    )
    recipe.answers(["card", "top up"], tokenizer, arguments())
    with pytest.raises(ConfigurationError, match=r"(?s)with its label \(no system\).*leave out --system"):
        recipe.answers(["card", "top up"], tokenizer, arguments(system="Hi"))
    with pytest.raises(ConfigurationError, match=r"(?s)--max_length 12.*what stands around a text takes"):
        recipe.read(arguments().test_file, "test", arguments(max_length=12), tokenizer, LABELS, 4)


@pytest.mark.slow
@pytest.mark.data
def test_a_real_chat_model_answers_bank_questions(run, data_directory, smollm2_directory, tmp_path):
    """Two labels, whose words it follows before training, and no worse after it."""
    names, rows = ["card_swallowed", "exchange_rate"], []
    with (data_directory / "banking77" / "train.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["category"] in names]
    for split, some in (("train", rows[::2]), ("test", rows[1::6])):
        with (tmp_path / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *((row["text"], row["category"]) for row in some)])
    (tmp_path / "labels.json").write_text(json.dumps(names), encoding="utf-8")
    run(
        "classify_as_answers",
        *("--model", str(smollm2_directory), "--labels_file", str(tmp_path / "labels.json")),
        *("--train_file", str(tmp_path / "train.csv"), "--test_file", str(tmp_path / "test.csv")),
        *("--max_steps", "6", "--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "2"),
        *("--target_epsilon", "1000", "--learning_rate", "1e-3", "--lora_rank", "4", "--lora_layers", "6"),
        *("--output_dir", str(tmp_path / "out")),
    )
    before, after = accuracies(tmp_path / "out")
    assert before > 0.75
    assert after > 0.9
