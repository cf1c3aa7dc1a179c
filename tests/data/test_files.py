"""No row of a file is swallowed by another one, and nothing stands twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dp.data.files import rows_of_file
from hf_dp.errors import ConfigurationError


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_quote_in_tsv_is_text(tmp_path: Path) -> None:
    file = written(tmp_path / "a.tsv", 'text\tlabel\n"one\t0\ntwo\t1\nthree"\t0\n')
    assert [row["text"] for row in rows_of_file(file)] == ['"one', "two", 'three"']


def test_quotes_in_csv_hold_commas_and_lines(tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", 'text,label\n"a, ""b""\nc",0\nno "quotes",1\n')
    assert [row["text"] for row in rows_of_file(file)] == ['a, "b"\nc', 'no "quotes"']


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", 'text,label\none,0\n"no end,1\ntwo,0\n', "unexpected end"),
        ("a.csv", 'text,label\n"one" more,0\n', "expected after"),
        ("a.csv", "text,label,text\na,0,b\n", "a column twice"),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', "a name twice"),
        ("a.json", '[{"text": "a", "text": "b"}]', "a name twice"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        rows_of_file(written(tmp_path / name, text))
