"""Chats and pairs as people have them, read by the recipes that learn answers: learnt where they can be, else refused
by their row."""

import json
from types import SimpleNamespace

import pytest

from hf_dp.errors import ConfigurationError
from tests.recipes.conftest import TEMPLATE
from tests.training.workbench import a_chat_tokenizer

ASKED = {"role": "user", "content": "Why?"}
ANSWERED = {"role": "assistant", "content": "So."}
GREETING = {"role": "assistant", "content": "Hello."}
LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}"
)
RECIPE = SimpleNamespace(max_length=512)


def learnt(instruct, tokenizer, messages) -> list[str]:
    """The answers that are learnt, decoded, each up to where it ends."""
    row = instruct.encoded({"messages": messages}, tokenizer)
    spans, before = [], instruct.IGNORED
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (token, instruct.IGNORED)
        if label != instruct.IGNORED:
            spans = [*spans, [label]] if before == instruct.IGNORED else [*spans[:-1], [*spans[-1], label]]
        before = label
    return [tokenizer.decode(span) for span in spans]


@pytest.fixture
def instruct(part):
    """The recipe, and what it calls a token that is not learnt."""
    module = part("instruct")
    module.IGNORED = part("common.answers").IGNORED
    return module


@pytest.mark.parametrize("template", [None, LLAMA], ids=["with an end of each turn", "[INST]"])
def test_assistants_are_learnt_and_nobody_else(template, instruct):
    tokenizer = a_chat_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    end = tokenizer.eos_token
    so, nothing = (" So. " + end, "  " + end) if template else ("So." + end, end)
    silent = {"role": "assistant", "content": ""}
    assert learnt(instruct, tokenizer, [ASKED, ANSWERED, ASKED, ANSWERED, ASKED]) == [so, so]
    assert learnt(instruct, tokenizer, [ASKED, silent, ASKED, ANSWERED]) == [nothing, so]
    assert learnt(instruct, tokenizer, [GREETING, ASKED, ANSWERED]) == [so], "a greeting answers nothing"
    assert learnt(instruct, tokenizer, [ASKED]) == []


def test_an_assistant_is_told_of_the_tools_of_its_row_alone(instruct):
    tokenizer, tools = a_chat_tokenizer(), [{"type": "function", "function": {"name": "So"}}]
    tokenizer.chat_template = "{% if tools %}{{ 'Why?So.' }}{% endif %}" + tokenizer.chat_template
    row = {"messages": [ASKED, ANSWERED]}
    plain, *told = (
        instruct.encoded({**row, **more}, tokenizer)
        for more in ({}, {"tools": tools}, {"tools": json.dumps(tools)}, {"tools": None}, {"tools": "[]"})
    )
    before = tokenizer("Why?So.", add_special_tokens=False)["input_ids"]
    assert (
        told[0]
        == told[1]
        == {"input_ids": before + plain["input_ids"], "labels": [-100] * len(before) + plain["labels"]}
    )
    assert told[2] == told[3] == plain


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"from": "human", "value": "Why?"}]}, "each with role and content"),
        ({"messages": json.dumps([ASKED, ANSWERED])}, "each with role and content"),
        ({"messages": ["Why?", "So."]}, "each with role and content"),
        ({"messages": [ASKED, ANSWERED], "tools": "So."}, "tools are not a list, nor JSON of one"),
        ({"messages": [ASKED, ANSWERED], "tools": [{"name": "look"}]}, "leaves out tools that the rows have"),
        ({"messages": [ASKED, {**ANSWERED, "tool_calls": [{"name": "look"}]}]}, "leaves out calls of tools"),
        ({"messages": []}, "no messages, and no prompt with a completion"),
        ({"prompt": "Why?"}, "no messages, and no prompt with a completion"),
        ({"prompt": "Why?", "completion": None}, "no conversation that the chat template can render"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "no conversation that the chat template can render"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_row(row, words, instruct):
    rows = [{"messages": [ASKED, ANSWERED]}, row]
    with pytest.raises(ConfigurationError, match=words) as caught:
        instruct.encode_all(rows, "chats.jsonl", a_chat_tokenizer(), RECIPE)
    assert "row 1 (counted from 0) of chats.jsonl" in caught.value.found


def test_the_row_that_a_template_renders_in_two_ways_is_named(instruct):
    tokenizer = a_chat_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("m.role +", "(m.role if loop.last else m.role|upper) +")
    rows = [{"messages": [ASKED]}, {"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}]
    with pytest.raises(ConfigurationError, match=r"row 1 .counted from 0. of chats\.jsonl: the chat template"):
        instruct.encode_all(rows, "chats.jsonl", tokenizer, RECIPE)


def test_a_template_that_ends_the_text_once_is_no_other_way_of_rendering(instruct):
    tokenizer = a_chat_tokenizer()
    tokenizer.chat_template = TEMPLATE + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    rows = [{"messages": [ASKED, ANSWERED] * n} for n in (1, 3)]
    one, three = instruct.encode_all(rows, "chats.jsonl", tokenizer, RECIPE)
    answers = [[label for label in row["labels"] if label != -100] for row in (one, three)]
    assert answers[0][-1] == tokenizer.eos_token_id
    assert answers[1] == answers[0][:-2] * 3 + answers[0][-2:]  # the end of a line stands before it


def test_pairs_of_chats_need_no_prompt_of_their_own(part, tmp_path):
    preferences, file = part("preferences"), tmp_path / "a.jsonl"
    recipe = SimpleNamespace(table_column="mr", text_column="ref")
    row = {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, GREETING]}
    file.write_text(json.dumps(row), encoding="utf-8")
    pairs = preferences.pairs(str(file), "train", recipe, None)
    assert pairs[:1] == {"chosen": [row["chosen"]], "rejected": [row["rejected"]]}
    assert preferences.a_prompt_like(pairs) == [{"role": "user", "content": "A question."}]
    file.write_text(json.dumps({"prompt": "a", **row}) + "\n" + json.dumps(row), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="nothing in column 'prompt' of row 1"):
        preferences.pairs(str(file), "train", recipe, None)
    tools = [{"type": "function", "function": {"name": "So"}}]
    file.write_text(json.dumps({**row, "tools": tools}) + "\n" + json.dumps(row), encoding="utf-8")
    assert preferences.pairs(str(file), "train", recipe, None)["tools"] == [json.dumps(tools), "null"]
    texts = {"chosen": "a", "rejected": "b"}
    file.write_text(json.dumps(row) + "\n" + json.dumps(texts), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="row 1 .* has texts where row 0 .* has messages, or the reverse"):
        preferences.pairs(str(file), "train", recipe, None)
    file.write_text('{"prompt": "a", "good": "b"}', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="give rows with prompt, chosen and rejected"):
        preferences.pairs(str(file), "train", recipe, None)


def test_each_recipe_names_the_flags_that_it_has_for_columns(part):
    fix = {name: part("common.data").naming_columns(part(name).RecipeArguments) for name in ("causal_lm", "classify")}
    assert fix["causal_lm"] == "name the columns of your data with --text_column and --group_column."
    assert "--text_column, --label_column and --group_column" in fix["classify"]


def test_tables_without_slots_have_no_coverage(part):
    assert part("common.results").measured(("slot_coverage",), ["It is 5."], ["temp: 5"]) == {}
