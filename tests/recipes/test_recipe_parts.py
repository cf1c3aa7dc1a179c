"""What recipes share: the report by group, metrics without a network, rows of files, the smoke flag."""

import copy
import functools
import json
import math
import socket
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_dp import ReAttentionConfig
from hf_dp.errors import ConfigurationError
from hf_dp.parts.re_attention import ReAttention
from hf_dp.parts.re_attention.deviations import one_step, relative_counts
from tests.zoo import tiny


def report(part, directory, values, groups, **changes):
    options = {"measure": "accuracy", "larger_is_better": True, "directory": directory, **changes}
    part("common.groups").report_by_group(values, groups, **options)
    return json.loads((directory / "groups.json").read_text(encoding="utf-8"))


def test_each_group_has_its_mean_its_standard_error_and_its_gap(part, tmp_path, capsys):
    groups = ["a", "a", "a", "a", "b", "b", "[c] $x"]
    found = report(part, tmp_path, [1, 1, 1, 0, 1, 0, 1], groups, without_privacy=[1, 1, 1, 1, 1, 1, 1])
    first, second, single = found["groups"]
    assert (first["group"], first["n"], first["value"], first["gap"]) == ("a", 4, 0.75, -0.25)
    assert first["standard_error"] == pytest.approx(math.sqrt(0.75 * 0.25 * 4 / 3) / 2)
    assert first["gap_standard_error"] == pytest.approx(0.25)
    assert (second["value"], second["without_privacy"], second["gap"]) == (0.5, 1.0, -0.5)
    assert (single["group"], single["standard_error"]) == ("[c] $x", None)
    assert (found["worst_group"], found["all"]["n"]) == ("b", 7)
    assert found["all"]["value"] == pytest.approx(5 / 7)
    assert (tmp_path / "groups.png").read_bytes().startswith(b"\x89PNG")
    assert "[c] $x" in capsys.readouterr().out


def test_the_worst_group_has_the_largest_loss(part, tmp_path):
    found = report(part, tmp_path / "new", [1.0, 3.0], ["a", "b"], measure="loss", larger_is_better=False)
    assert found["worst_group"] == "b"
    assert "gap" not in found["groups"][0]


@pytest.mark.parametrize(
    ("values", "groups", "without"),
    [([], [], None), ([1.0], ["a", "b"], None), ([1.0], ["a"], [1.0, 0.0]), ([math.nan], ["a"], None)],
)
def test_values_that_do_not_go_with_groups_are_refused(values, groups, without, part, tmp_path):
    with pytest.raises(ConfigurationError):
        report(part, tmp_path, values, groups, without_privacy=without)
    assert not list(tmp_path.iterdir())


def test_metrics_by_hand_and_without_a_network(part, monkeypatch):
    def refuse(*_):
        raise AssertionError("a metric used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    measured = part("common.results").measured
    # F1 of label 0: 2 / 3, of 1: 2 / 4, of 2, which was never right: 0.
    found = measured(("accuracy", "macro_f1"), [0, 0, 1, 2], [0, 1, 1, 1])
    assert found == pytest.approx({"accuracy": 0.5, "macro_f1": (2 / 3 + 1 / 2 + 0) / 3})
    # Tokens count alike, not examples: exp((1 * 1 + 3 * 2) / 4).
    assert measured(("perplexity",), [1.0, 2.0], [1, 3]) == pytest.approx({"perplexity": math.exp(7 / 4)})
    # "a c" of three words and two: 4 / 5; of the two references the better one. Nothing in common, or nothing said: 0.
    said, wanted = ["A, b; c", "d", ""], [["e", "a c"], ["e f"], ["g"]]
    assert measured(("rouge_l",), said, wanted) == pytest.approx({"rouge_l": (4 / 5 + 0 + 0) / 3})


def test_rows_of_files(part, tmp_path):
    read_rows = part("common.data").read_rows
    (tmp_path / "a.csv").write_text('text,label\n"one, two",x\nthree,y\n', encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("text\tlabel\none, two\tx\n", encoding="utf-8")
    csv, tsv, lines = (str(tmp_path / f"a.{ending}") for ending in ("csv", "tsv", "jsonl"))
    assert read_rows(csv, split="train", columns=("text",))[0] == {"text": "one, two", "label": "x"}
    assert read_rows(tsv, split="train", columns=("text",)) == [{"text": "one, two", "label": "x"}]
    assert read_rows(lines, split="train", columns=("text",), max_examples=1) == [{"text": "one"}]
    with pytest.raises(ConfigurationError, match="no column 'label'"):
        read_rows(lines, split="train", columns=("text", "label"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text,label\ncaf\xe9,x\n".encode("latin-1"), "no UTF-8 text"),
        ("a.csv", bytes(range(256)), "no UTF-8 text"),
        ("a.csv", b"", "has no column 'text'"),
        ("a.csv", b"one,x\n", "has no column 'text'"),
        ("a.csv", b"text,label\none, two,x\n", "row 1, which has no columns, or more than the header"),
        ("a.csv", b"text,label\none,x\ntwo\n", "has nothing in column 'label' of row 2"),
        ("a.json", b"[1, 2]", "row 1, which has no columns"),
        ("a.json", b"[" * 100_000, "cannot be read"),
        ("a.jsonl", b'{"text": 1', "cannot be read"),
        ("a.jsonl", b'{"text": 5, "label": "x"}', "has int in column 'text' of row 1"),
        ("a.jsonl", b'{"text": null, "label": "x"}', "has nothing in column 'text' of row 1"),
        ("a.jsonl", b'{"text": "a", "label": "x"}\n{"text": "b"}', "has nothing in column 'label' of row 2"),
        ("a.tsv", b"text\tlabel\none\tx\ty\n", "row 1, which has no columns, or more than the header"),
        ("a.xml", b"<text/>", "the ending '.xml'"),
        ("b.csv", None, "no file"),
    ],
)
def test_files_that_are_no_rows_are_refused(name, content, words, part, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=words):
        part("common.data").read_rows(str(tmp_path / name), split="train", columns=("text",), others=("label",))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ConfigurationError, match="Is a directory"):
        part("common.data").read_rows(str(tmp_path / "folder.csv"), split="train", columns=("text",))


def test_a_byte_order_mark_and_a_long_text_are_read(part, tmp_path):
    row = {"text": "a" * 200_000, "label": "x"}
    (tmp_path / "a.csv").write_text(f"text,label\n{row['text']},x\n", encoding="utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps([row]), encoding="utf-8-sig")
    for name in ("a.csv", "a.json"):
        found = part("common.data").read_rows(str(tmp_path / name), split="train", columns=("text",), others=("label",))
        assert found == [row]


@pytest.fixture
def parsed(part, tmp_path, monkeypatch):
    """Arguments of `classify` with these changes."""

    def parse(**changes):
        encoder = tmp_path / "encoder"
        encoder.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            (encoder / name).touch()
        files = {"train_file": "a.csv", "test_file": "a.csv", "labels_file": "a.json", "output_dir": tmp_path / "out"}
        values = {**files, "encoder": encoder, "use_cpu": 1, "target_epsilon": 3, **changes}
        path = tmp_path / "a.yaml"
        path.write_text(json.dumps({k: v if isinstance(v, int) or v is None else str(v) for k, v in values.items()}))
        monkeypatch.setattr(sys, "argv", ["recipe", str(path)])
        return part("common.arguments").parse(part("classify").RecipeArguments)

    return parse


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_examples": 0}, "--max_examples 0"),
        ({"max_examples": -3}, "--max_examples -3"),
        ({"max_length": -1}, "--max_length -1"),
        ({"lora_rank": 0}, "--lora_rank 0"),
        ({"temperature": "nan"}, "--temperature nan"),
        ({"head_noise": -1}, "--head_noise -1"),
        ({"average": 2}, "--average 2"),
        ({"learning_rate": -1}, "learning_rate=-1"),
        ({"fp16": 1}, "fp16=True"),
        ({"encoder": "/nowhere/at/all"}, "no directory with a model"),
        ({"encoder": ""}, "no directory with a model"),
    ],
)
def test_arguments_with_which_nothing_could_be_learnt_are_refused(changes, words, parsed):
    with pytest.raises(ConfigurationError, match=words):
        parsed(**changes)


def test_places_that_cannot_be_used_are_refused_before_training(parsed, tmp_path):
    made, _, _ = parsed(group_column=None)
    assert made.group_column is None, "null in YAML is the default"
    (tmp_path / "file").touch()
    for output in ("file", "file/below"):
        with pytest.raises(ConfigurationError, match="is a file, or lies below one"):
            parsed(output_dir=tmp_path / output)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").touch()
    with pytest.raises(ConfigurationError, match="no directory with a tokenizer"):
        parsed(encoder=tmp_path / "half")


def test_smoke_wins_over_the_file_and_flags_win_over_it(part, tmp_path, monkeypatch):
    arguments, recipe = part("common.arguments"), part("causal_lm").RecipeArguments
    path = tmp_path / "a.yaml"
    path.write_text("text_file: t.txt\nmax_steps: 500\nlearning_rate: 0.5\ntarget_epsilon: 3\n", encoding="utf-8")

    def parsed(*flags):
        monkeypatch.setattr(sys, "argv", ["recipe", str(path), "--output_dir", str(tmp_path), "--use_cpu", "1", *flags])
        return arguments.parse(recipe)

    made, training, privacy = parsed("--smoke", "true", "--per_device_train_batch_size", "4")
    assert (made.max_examples, training.max_steps, training.learning_rate, privacy.target_epsilon) == (64, 2, 0.5, 3)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (4, 2)
    assert training.save_strategy == "no"
    made, training, _ = parsed()
    assert (made.max_examples, training.max_steps) == (None, 500)
    assert parsed("--after", "out/sft")[2].after == "out/sft"
    path.write_text(f"{path.read_text(encoding='utf-8')}after: [a, b]\n", encoding="utf-8")
    ways = (), ("--after", "c", "d"), ("--after", "c", "--after", "d"), ("--after=c", "--after", "d", "e")
    assert [parsed(*flags)[2].after for flags in ways] == [("a", "b"), ("c", "d"), ("c", "d"), ("c", "d", "e")]


def test_shards_that_accelerate_would_make_are_refused(part, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    flags = ["--text_file", "t.txt", "--output_dir", str(tmp_path), "--use_cpu", "1", "--target_epsilon", "3"]
    monkeypatch.setattr(sys, "argv", ["recipe", *flags])
    with pytest.raises(ConfigurationError, match="a recipe under FSDP"):
        part("common.arguments").parse(part("causal_lm").RecipeArguments)


def test_training_ends_with_the_average_of_its_weights(part):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    average = part("common.moving_average").MovingAverage(0.75)
    average.on_train_begin(model=model)
    for weight in (4.0, 8.0):
        torch.nn.init.constant_(model.weight, weight)
        average.on_step_end()
    average.on_train_end()
    assert float(model.weight) == 0.75 * (0.25 * 4) + 0.25 * 8


def test_bleu_and_slot_coverage_by_hand(part):
    measured = part("common.results").measured
    # All n-grams are right; 6 words for references of 6 and, the closest, 1: exp(1 - 7 / 6).
    said, wanted = ["The cat sat on the", "a"], [["the cat sat on the mat"], ["b b b", "A"]]
    assert measured(("bleu",), said, wanted) == pytest.approx({"bleu": math.exp(-1 / 6)})
    # No four words in a row are right.
    assert measured(("bleu",), ["the cat sat in the mat"], [["the cat sat on the mat"]]) == {"bleu": 0.0}
    tables = ["name[Blue Spice], area[city centre], familyFriendly[yes]", "familyFriendly[no]"]
    assert measured(("slot_coverage",), ["blue spice is nice", "no"], tables) == {"slot_coverage": 0.5}


def test_a_json_list_is_rows_as_well(part, tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"},\n {"text": "two"}]', encoding="utf-8")
    found = part("common.data").read_rows(str(tmp_path / "a.json"), split="train", columns=("text",))
    assert found == [{"text": "one"}, {"text": "two"}]


def test_rarity_by_hand(part):
    comparison = part("common.comparison")
    # Of 30 occurrences more frequent ids have 0, 9, 9, 25, 30.
    counts = np.array([9, 8, 8, 5, 0])
    assert comparison.rarity(counts).tolist() == [0, 0, 0, 2, 2]
    assert comparison.rarity(np.array([2, 1, 1, 1, 1])).tolist() == [0, 1, 1, 1, 1]
    train = np.repeat(np.arange(4), [6, 5, 2, 1]).reshape(-1, 2)
    # Ids 0 to 3 have 0, 6, 11 and 13 of 14 before them: head, middle, tail, tail.
    found = comparison.by_rarity(train, np.array([[0, 3], [1, 2], [3, 4]]))
    assert found == ["head", "middle", "tail"]


def test_the_ordinary_trainer_takes_the_mean_over_the_examples_of_a_whole_batch(part, tmp_path):
    model = torch.nn.Linear(3, 2)
    wanted = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(0)
    rows = [{"input": torch.randn(3, generator=draw).tolist(), "labels": i % 2} for i in range(7)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, max_grad_norm=0.0,
        lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    comparison = part("common.comparison")
    optimizers = torch.optim.SGD(model.parameters(), lr=1.0), None
    folder = comparison.folder_of(tmp_path, "epsilon 1e+2, a/b")
    comparison.trainer(
        model, arguments, folder, None, train_dataset=rows, data_collator=comparison.collate, optimizers=optimizers
    ).train()
    batch = comparison.collate(rows)
    torch.nn.functional.cross_entropy(wanted(batch["input"]), batch["labels"]).backward()
    for mine, other in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, other - other.grad)
    assert folder == tmp_path / "epsilon_1e+2_a_b"
    assert not list(folder.iterdir())


@pytest.fixture
def interactions(tmp_path):
    """Three users; the last has too few items."""
    path = tmp_path / "interactions.txt"
    lines = [f"u{user} i{(1 + user) * step} {'de'[user]}\n" for user in range(2) for step in range(1, 4 + 3 * user)]
    path.write_text("".join([*lines, "few i1 d\n"]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("column", "groups"), [("group", ["d", "e"]), ("length", ["under 5", "5 to 9"]), ("rarity", ["tail", "tail"])]
)
def test_groups_of_users(column, groups, part, interactions):
    sequences, given = part("common.sequences"), {"interactions_file": str(interactions), "items_are_public": True}
    found = sequences.load(sequences.SequenceData(group_column=column, **given))
    assert found.groups == groups
    # The order in which private lines name them decides nothing.
    assert found.names == ["i1", "i10", "i12", "i2", "i3", "i4", "i6", "i8"]
    assert [row["labels"] for row in found.test] == [5, 3]
    assert [row["labels"] for row in found.train] == [4, 2]
    assert found.train[1]["input_ids"][:5] == [4, 6, 7, 8, 0]


def test_public_items_have_their_places_and_others_are_refused(part, interactions, tmp_path):
    sequences, items = part("common.sequences"), [f"i{number}" for number in range(20, 0, -1)]
    path = tmp_path / "items.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    given = sequences.SequenceData(interactions_file=str(interactions), items_file=str(path))
    found = sequences.load(given)
    assert (found.items, found.names) == (20, items)
    assert [items[row["labels"] - 1] for row in found.test] == ["i3", "i12"]
    assert sequences.item_tokenizer(found)("i20 i1")["input_ids"] == [1, 20]
    path.write_text(json.dumps(items[1:-1]), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="has the item 'i1', which is not in items_file"):
        sequences.load(given)


@pytest.mark.parametrize(
    ("text", "words"),
    [("u i\n\nu i\n", "line 2 of"), ("u i\nu i\n", "no user"), ("u i\n" * 3, "there is no group in it")],
)
def test_interactions_that_cannot_be_used(text, words, part, interactions):
    sequences = part("common.sequences")
    interactions.write_text(text, encoding="utf-8")
    given = {"interactions_file": str(interactions), "items_are_public": True}
    with pytest.raises(ConfigurationError, match=words):
        sequences.load(sequences.SequenceData(**given, group_column="group"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"interactions_file": "lines"}, "--interactions_file lines without --items_file"),
        ({"items_are_public": True}, "without --interactions_file"),
        ({"items_file": "items"}, "without --interactions_file"),
    ],
)
def test_which_items_there_are_is_public_or_refused(given, words, part):
    with pytest.raises(ConfigurationError, match=words):
        part("common.sequences").SequenceData(**given)


def test_the_saved_form_of_the_next_item_gives_the_same_scores(part):
    from transformers import GPT2Config

    parts, ids, mask = (
        part("common.next_item"),
        torch.tensor([[3, 4, 5], [6, 2, 0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0]]),
    )
    for with_bias in (False, True):
        config = GPT2Config(vocab_size=9, n_positions=5, n_embd=8, n_layer=1, n_head=2)
        model = parts.NextItem(config, with_bias).eval()
        if with_bias:
            torch.nn.init.normal_(model.output.bias)
        found = parts.as_language_model(model)(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(found[[0, 1], [2, 1]], model(ids, mask))


@pytest.mark.parametrize("arm", ["on", "shuffled", "constant"])
def test_controls_of_re_attention_change_which_row_has_which_noise_and_nothing_else(part, arm, monkeypatch):
    def has_none(model):
        raise NotImplementedError  # as of a model of one's own around an encoder

    model = tiny("gpt2", "causal_lm")
    monkeypatch.setattr(type(model), "get_input_embeddings", has_none)
    attention = ReAttention(model, ReAttentionConfig(token_frequencies="uniform"))
    counts = relative_counts(model, 64, torch.linspace(0.1, 1, model.config.vocab_size))
    attention.errors, table = one_step(counts, 0.1), "transformer.wte.weight"
    before = copy.deepcopy(attention.errors)
    part("common.comparison").VarianceControl(arm).on_train_begin(None, None, None, model=model)
    others, rows = attention.errors, attention.errors.pop(table)
    expected = before.pop(table)
    torch.testing.assert_close(others, before)
    torch.testing.assert_close(rows.square().mean(), expected.square().mean())
    assert torch.equal(rows.flatten().sort().values, expected.flatten().sort().values) == (arm != "constant")
    assert torch.equal(rows, expected) == (arm == "on")
    assert bool((rows == rows[0]).all()) == (arm == "constant")


def test_generation_gives_the_output_layer_states_without_gaps_and_says_the_same(part):
    model = tiny("llama_tied", "causal_lm", num_hidden_layers=1).eval()
    asked, gaps, said = torch.tensor([[3, 4, 5], [6, 7, 8]]), [], []
    model.lm_head.register_forward_hook(lambda _, states, __: gaps.append(not states[0].is_contiguous()))
    for context in (nullcontext, part("common.base_models").generating):
        with context(model):
            said.append(model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=2, do_sample=False))
    assert gaps == [True, False, False, False]
    assert said[0].equal(said[1])
    assert not model.lm_head._forward_pre_hooks


def test_a_loss_of_tokens_is_shared_out_among_their_characters(part, monkeypatch):
    plays = part("causal_lm")
    scores = part("common.results").Scores({"perplexity": math.exp(1.5)}, [1.5, 1.5])
    monkeypatch.setattr(plays, "scored_by_loss", lambda *_: scores)
    rows = [{"input_ids": [9, 1, 2]}, {"input_ids": [9, 3]}]  # the first token of a row is not predicted
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join({9: "!", 1: "to", 2: " b", 3: "e or"}[i] for i in ids))
    found = plays.scored(None, rows, tokenizer).measures
    assert found["loss per character"] == pytest.approx(1.5 * 3 / 8)
    assert found["perplexity of a character"] == pytest.approx(math.exp(1.5 * 3 / 8))


def test_an_adapter_that_lies_beside_a_record_keeps_where_it_lay(part, tmp_path):
    tiny("llama", "causal_lm", torch.float32).save_pretrained(tmp_path / "base")
    read = functools.partial(part("common.hub_names").pretrained, AutoModelForCausalLM)
    adapted = get_peft_model(read(str(tmp_path / "base")), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    for record, place in ((False, "base"), (True, "adapter")):
        if record:
            (tmp_path / "adapter" / "privacy.json").write_text("{}")
        assert read(str(tmp_path / "adapter")).config._name_or_path == str(tmp_path / place)
