"""No row of a file is swallowed by another one, and nothing stands twice."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_dp.data.files import rows_of_file
from hf_dp.errors import ConfigurationError


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_quote_in_tsv_is_text(tmp_path: Path) -> None:
    file = written(tmp_path / "a.tsv", 'text\tlabel\n"one\t0\ntwo\t1\nthree"\t0\nfour\t"1\n')
    assert [row["text"] for row in rows_of_file(file)] == ['"one', "two", 'three"', "four"]


@pytest.mark.parametrize(
    "text", ['say "x" or "y"', '"Yes," he said, "now"', '"so it begins', 'it ends"', '"', '5" and 6"', '""so"" it is']
)
def test_quotes_that_have_one_reading_stay(tmp_path: Path, text: str) -> None:
    for form in ("text\tlabel\none\t0\n{}\t1\n", "label\ttext\n0\t{}\n", "text\none\n{}\n"):
        rows = rows_of_file(written(tmp_path / "a.tsv", form.format(text)))
        assert rows[-1]["text"] == text


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_quotes_that_a_program_put_around_fields_of_tsv_are_taken_off(tmp_path: Path, quoting: Any) -> None:
    rows = [{"text": text, "label": n} for n, text in enumerate(["one", 'say "two"', "", '"three"', "four, five"])]
    with (tmp_path / "a.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"], delimiter="\t", quoting=quoting)
        writer.writeheader()
        writer.writerows(rows)
    assert rows_of_file(tmp_path / "a.tsv") == [{**row, "label": str(row["label"])} for row in rows]


def test_parquet_has_its_rows_and_what_is_none_is_told(tmp_path: Path) -> None:
    rows = [{"text": "one", "label": 1, "talk": [{"role": "user"}]}, {"text": "two", "label": None, "talk": []}]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert rows_of_file(tmp_path / "a.parquet") == rows
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-30])
    for path in ("a.parquet", "b.parquet"):
        with pytest.raises(ConfigurationError, match="cannot be read") as refused:
            rows_of_file(tmp_path / path)
        assert str(refused.value).count("cannot be read") == 1


def test_quotes_in_csv_hold_commas_and_lines(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", 'text,label\n"a, ""b""\nc",0\nno "quotes",1\n')
    assert [row["text"] for row in rows_of_file(file)] == ['a, "b"\nc', 'no "quotes"']


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", 'text,label\none,0\n"no end,1\ntwo,0\n', "row 1 .counted from 0.: unexpected end"),
        ("a.jsonl", '{"a": 1}\n\n{"a": 2}\n{"a": \n', "row 2 .counted from 0.: Expecting value, at character 6"),
        ("a.csv", 'text,label\n"one" more,0\n', "expected after"),
        ("a.tsv", 'text\tlabel\n"quoted, simply"\t0\nnot so\t1\n', "is quoted as in CSV(.|\n)*Save the file as CSV"),
        ("a.tsv", 'text\tlabel\none\t""\ntwo\t1\n', "is quoted as in CSV"),
        ("a.tsv", '"text"\tlabel\none\t0\n', "is quoted as in CSV"),
        ("a.tsv", 'text\tlabel\n"by ""need"""\t0\nand "not"\t1\n', "is quoted as in CSV"),
        ("a.tsv", '"a"\ta\n1\t2\n', "is quoted as in CSV"),
        ("a.tsv", 'text\tlabel\none\t0\n"two\nlines"\t1\n', "row 1 .counted from 0. has fewer columns than the header"),
        ("a.tsv", 'label\ttext\n0\t"two\nlines"\n', "row 1 .counted from 0. has fewer columns than the header"),
        ("a.tsv", 'text\none\n"two\nlines"\n', "begin in one line and end in another"),
        ("a.tsv", 'text\tlabel\n"one\t0\ntwo\t1\nthree"\t0\n', "begin in one line and end in another"),
        ("a.tsv", 'text\tlabel\r\n"one\t0\r\n""two""\t1\r\nthree"\t0\r\n', "begin in one line and end in another"),
        ("a.csv", "text,label,text\na,0,b\n", "a column twice"),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', "a name twice"),
        ("a.json", '[{"text": "a", "text": "b"}]', "a name twice"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        rows_of_file(written(tmp_path / name, text))
