"""Files and settings of one's own: TSV, the column of labels, features kept between runs, 16 bits without a GPU."""

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    ModernBertConfig,
    PretrainedConfig,
    RobertaConfig,
)

from hf_dp.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("checked_once")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parsed(part, tmp_path, monkeypatch):
    """Arguments of `classify` with these changes."""

    def parse(**changes):
        encoder = tmp_path / "encoder"
        encoder.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            (encoder / name).touch()
        files = {"train_file": "a.csv", "test_file": "a.csv", "labels_file": "a.json", "encoder": str(encoder)}
        values = {**files, "output_dir": str(tmp_path / "out"), "target_epsilon": 3, **changes}
        (tmp_path / "a.yaml").write_text(json.dumps(values), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["recipe", str(tmp_path / "a.yaml")])
        return part("common.arguments").parse(part("classify").RecipeArguments)

    return parse


def test_quotes_in_tsv_are_text_and_take_in_no_row(part, tmp_path):
    read_rows, file = part("common.data").read_rows, tmp_path / "a.tsv"
    file.write_text('text\tlabel\none, "two"\tx\n"three\tx\n', encoding="utf-8")
    rows = read_rows(str(file), split="train", columns=("text",), others=("label",))
    assert rows == [{"text": 'one, "two"', "label": "x"}, {"text": '"three', "label": "x"}]
    file.write_text('text\tlabel\n"one two three"\tx\nfour\tx\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="is quoted as in CSV"):
        read_rows(str(file), split="train", columns=("text",))


def test_long_texts_are_cut_off_and_said(part, questions_directory, encoder_directory, capsys):
    recipe, path = part("classify").RecipeArguments, str(questions_directory / "test.csv")
    tokenizer = AutoTokenizer.from_pretrained(encoder_directory)
    given = recipe(train_file=path, test_file=path, encoder=str(encoder_directory), label_column="label")
    read, names = part("common.classification").read, ["card_lost", "cash_fee", "top_up"]
    lengths = [len(ids) for ids in read(path, "test", given, tokenizer, names)["input_ids"]]
    assert not capsys.readouterr().out
    given.max_length = 8
    cut = read(path, "test", given, tokenizer, names)["input_ids"]
    assert [len(ids) for ids in cut] == [min(8, length) for length in lengths]
    longer = sum(length > 8 for length in lengths)
    assert f"{path}: {longer} of 30 rows are cut off after 8 tokens (--max_length)" in capsys.readouterr().out


@pytest.mark.parametrize(("config", "most"), [(BertConfig, 20), (RobertaConfig, 18), (ModernBertConfig, None)])
def test_texts_for_which_an_encoder_has_no_positions(config, most, part):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = AutoModel.from_config(config(vocab_size=9, max_position_embeddings=20, pad_token_id=1, **sizes))
    check = part("common.classification").check_positions
    check(model, most or 1000)
    if most is not None:
        model(torch.full((1, most), 3))
        with pytest.raises(ConfigurationError, match=f"take --max_length {most} or less"):
            check(model, most + 1)


def test_features_are_computed_once_of_the_same_texts_and_weights_and_never_of_others(part, tmp_path):
    kept, encoder, calls = part("common.kept_features").kept, torch.nn.Linear(2, 3), []

    def of(*rows, batch_size=4, directory=str(tmp_path / "private")):
        made = lambda: calls.append(rows) or torch.full((len(rows), 3), float(len(calls)))  # noqa: E731
        return float(kept(directory, encoder, rows, batch_size, made)[0, 0])

    assert [of([1, 2]), of([1, 2]), of([1, 3]), of([1, 2], batch_size=5), of([1, 2])] == [1, 1, 2, 3, 1]
    with torch.no_grad():
        encoder.weight[0, 0] += 1e-6
    assert of([1, 2]) == 4, "of other weights"
    assert of([1, 2], directory=None) == 5, "nothing is kept where nobody asked"
    assert len(list((tmp_path / "private").iterdir())) == 4


def test_features_that_are_made_otherwise_are_others(part, tmp_path, monkeypatch):
    kept, encoder, calls = part("common.kept_features").kept, torch.nn.Linear(2, 3), []
    encoder.config = PretrainedConfig(attn_implementation="eager")
    (tmp_path / "pooling.py").write_text("SCALE = 64\n\ndef pooling(): return SCALE\n")
    pooling = runpy.run_path(str(tmp_path / "pooling.py"))["pooling"]

    def of():
        made = lambda: calls.append(0) or torch.full((1, 3), float(len(calls)))  # noqa: E731
        return int(kept(str(tmp_path / "private"), encoder, [[1]], 4, made, pooling)[0, 0])

    assert [of(), of()] == [1, 1]
    encoder.config._attn_implementation = "sdpa"
    assert [of(), of()] == [2, 2]
    (tmp_path / "pooling.py").write_text("SCALE = 32\n\ndef pooling(): return SCALE\n")
    assert [of(), of()] == [3, 3], "of another constant beside the function"
    monkeypatch.setattr("common.kept_features.__version__", "another")
    assert [of(), of()] == [4, 4]


@pytest.mark.parametrize("change", [lambda whole: whole[:-5], lambda whole: whole[:-1] + b"@", lambda whole: b""])
def test_features_that_were_cut_or_changed_are_refused(change, part, tmp_path):
    kept, encoder = part("common.kept_features").kept, torch.nn.Linear(2, 3)
    kept(str(tmp_path), encoder, [[1]], 4, lambda: torch.ones(1, 3))
    (path,) = tmp_path.iterdir()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigurationError, match="delete it, and they are computed again"):
        kept(str(tmp_path), encoder, [[1]], 4, lambda: torch.ones(1, 3))


@pytest.mark.parametrize(("method", "place"), [("head", "out"), ("head", "out/features"), ("lora", "elsewhere")])
def test_features_of_private_texts_are_not_kept_beside_a_model(method, place, part, tmp_path):
    check = part("common.kept_features").check_place
    with pytest.raises(ConfigurationError, match="--features_dir"):
        check(str(tmp_path / place), method, str(tmp_path / "out"))
    check(str(tmp_path / "features"), "head", str(tmp_path / "out"))
    check(None, "lora", str(tmp_path / "out"))


def test_sixteen_bits_are_trained_in_on_a_cpu_where_there_is_nothing_else(parsed, monkeypatch):
    _, arguments, _ = parsed(bf16="true", use_cpu=None)
    assert (arguments.bf16, arguments.use_cpu) == (True, not torch.accelerator.is_available())
    _, arguments, _ = parsed(use_cpu=None)
    assert not arguments.use_cpu
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="use_cpu"):
            parsed(bf16="true", use_cpu=None)  # of an old GPU Transformers says it, and no CPU is taken in its place


@pytest.mark.parametrize(
    ("columns", "given", "found"),
    [
        (["text", "category"], {}, "category"),
        (["id", "text", "label"], {}, "label"),
        (["text", "intent", "branch"], {"group_column": "branch"}, "intent"),
        (["text", "intent"], {"group_column": "intent"}, "intent"),
        (["text", "intent", "user"], {"unit": "user"}, "intent"),
        (["text", "intent", "user"], {}, None),
        (["text"], {}, None),
        (["text", "intent", "label"], {"label_column": "intent"}, "intent"),
    ],
)
def test_labels_are_in_the_one_column_that_is_left(parsed, part, tmp_path, columns, given, found):
    (tmp_path / "a.jsonl").write_text(json.dumps({name: "yes" if name == found else "a b" for name in columns}))
    unit = given.pop("unit", None)
    recipe, _, _ = parsed(**given)
    labelled = part("common.data").labelled
    if found is None:
        with pytest.raises(ConfigurationError, match=f"{', '.join(columns)}(.|\n)*--label_column"):
            labelled(str(tmp_path / "a.jsonl"), "train", recipe, ["no", "yes"], unit)
    else:
        assert labelled(str(tmp_path / "a.jsonl"), "train", recipe, ["no", "yes"], unit)["labels"] == [1]


def test_what_was_not_called_a_label_is_not_printed(parsed, part, tmp_path):
    (tmp_path / "a.csv").write_text("text,sender\nhello,someone@example.org\n", encoding="utf-8")
    for given, shown in ({}, False), ({"label_column": "sender"}, True):
        recipe, _, _ = parsed(**given)
        with pytest.raises(ConfigurationError, match="in column 'sender' of row 0 (.|\n)*--label_column") as refused:
            part("common.data").labelled(str(tmp_path / "a.csv"), "train", recipe, ["no", "yes"])
        assert ("someone" in str(refused.value)) == shown


def test_no_row_alone_says_where_the_labels_of_others_are(parsed, part, tmp_path):
    rows = [{"text": "a", "category": "yes"}, *[{"text": "a", "category": "yes", "label": "no"}] * 3]
    recipe, _, _ = parsed()
    for places in (slice(None), slice(None, None, -1)):
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows[places])))
        with pytest.raises(ConfigurationError, match="'label'"):
            part("common.data").labelled(str(tmp_path / "a.jsonl"), "train", recipe, ["no", "yes"])


def test_what_is_counted_in_private_data_says_so(part, capsys):
    show = part("common.next_item_results").show
    show({"epsilon 3, off": [(12.5, 32.5)]}, (18.76, 35.0))
    assert "show it to nobody" in " ".join(capsys.readouterr().out.split())
    show({"epsilon 3, off": [(12.5, 32.5)]}, None)
    assert "nobody" not in capsys.readouterr().out


def sequences(part, path, text, **given):
    path.write_text(text, encoding="utf-8")
    kind = part("common.sequences")
    return kind.load(kind.SequenceData(interactions_file=str(path), **given))


def test_interactions_of_a_table_are_in_the_order_of_their_times(part, tmp_path):
    times = {"a b": "3", "c": "1", "d": "2e0", "e": "4"}
    rows = [f"{user},{item},{time}" for item, time in times.items() for user in ("u", "v")]
    given = {"items_are_public": True, "user_column": "who", "item_column": "what"}
    text = "\n".join(["who,what,when", *rows])
    found = sequences(part, tmp_path / "a.csv", text, time_column="when", **given)
    assert found.names == ["a_b", "c", "d", "e"]
    assert found.test == [{"input_ids": [2, 3, 1] + [0] * 17, "attention_mask": [1] * 3 + [0] * 17, "labels": 4}] * 2
    dated = text.replace("2e0", "2").replace("\n", "\n").replace(",3", ",2026-03-01").replace(",1", ",2026-01-01")
    dated = dated.replace(",2\n", ",2026-02-01\n").replace(",4", ",2026-04-01")
    assert sequences(part, tmp_path / "b.csv", dated, time_column="when", **given).test == found.test
    assert sequences(part, tmp_path / "a.csv", text, **given).test[0]["input_ids"][:3] == [1, 2, 3]
    for wrong in ("soon", "nan"):
        with pytest.raises(ConfigurationError, match="numbers alone, or dates alone"):
            sequences(part, tmp_path / "c.csv", text.replace("2e0", wrong), time_column="when", **given)
    with pytest.raises(ConfigurationError, match="no column 'user'(.|\n)*--user_column"):
        sequences(part, tmp_path / "a.csv", text, items_are_public=True)


def test_several_items_of_a_user_are_learnt_from(part, tmp_path):
    text = "".join(f"u {item}\n" for item in "abcde") + "".join(f"v {item}\n" for item in "bca")
    found = sequences(part, tmp_path / "a.txt", text, items_are_public=True, targets=2, longest=3)
    assert [(row["labels"], row["after"]) for row in found.train] == [([3, 4], [1, 2]), ([3, -100], [0, 0])]
    assert [row["labels"] for row in found.test] == [5, 1]


def test_popularity_of_what_is_new_leaves_out_what_was_seen(part):
    kind = part("common.sequences")
    rows = [{"input_ids": [1, 2], "labels": label} for label in (3, 3, 3, 2, 2, 1)]
    data = kind.Sequences(
        rows, [{"input_ids": [3, 0], "labels": 2}, {"input_ids": [3, 2], "labels": 3}], ["a"] * 3, None
    )
    assert kind.popularity(data).tolist() == pytest.approx([1 / math.log2(3), 1.0])
    assert kind.popularity(data, only_new=True).tolist() == [1.0, 0.0]


def test_a_sample_begins_as_ones_own_texts_do_and_cards_have_words_of_nobody(part):
    plays, tables = part("causal_lm"), part("table_to_text")
    rows, tokenizer = [{"input_ids": list(range(8))}], SimpleNamespace(encode=lambda text: [7] * len(text))
    own, given = (plays.RecipeArguments(text_file="a.txt", prompt=prompt) for prompt in (None, "ab"))
    assert plays.beginning(own, tokenizer, rows) == [0, 1]
    assert plays.beginning(own, tokenizer, [{"input_ids": [5]}]) == [5]
    assert plays.beginning(given, tokenizer, rows) == [7, 7]
    assert tables.a_table_like("patient[x], drug[y]") == "A table."
    assert tables.a_table_like("name[Alimentum], area[city centre]") == "name[Blue Spice], food[Italian]"
