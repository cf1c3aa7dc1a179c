"""What recipes read: rows of files, and the interactions of users with items."""

import json

import pytest

from hf_dp.errors import ConfigurationError


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
        ("a.csv", b"text;label\none;x\n", "has no column 'text' (.|\n)*separate columns by commas"),
        ("a.csv", b"text;label\none, two;x\n", "row 0 (.|\n)*separate columns by commas"),
        ("a.csv", b"text\tlabel\none\tx\n", "has no column 'text' (.|\n)*separate columns by commas"),
        ("a.csv", b"text,label\none, two,x\n", "row 0 .counted from 0., which has no columns, or more than the header"),
        ("a.csv", b"text,label\none,x\ntwo\n", "has nothing in column 'label' of row 1"),
        ("a.json", b"[1, 2]", "row 0 .counted from 0., which has no columns"),
        ("a.json", b"[" * 100_000, "cannot be read"),
        ("a.jsonl", b'{"text": 1', "cannot be read"),
        ("a.jsonl", b'{"text": 5, "label": "x"}', "has int in column 'text' of row 0"),
        ("a.jsonl", b'{"text": null, "label": "x"}', "has nothing in column 'text' of row 0"),
        ("a.jsonl", b'{"text": "a", "label": "x"}\n{"text": "b"}', "has nothing in column 'label' of row 1"),
        ("a.tsv", b"text\tlabel\none\tx\ty\n", "row 0 .counted from 0., which has no columns, or more than the header"),
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


def test_a_json_list_is_rows_as_well(part, tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "one"},\n {"text": "two"}]', encoding="utf-8")
    found = part("common.data").read_rows(str(tmp_path / "a.json"), split="train", columns=("text",))
    assert found == [{"text": "one"}, {"text": "two"}]


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
