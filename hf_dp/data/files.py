"""Rows of a file as they are, or a refusal that says what is wrong with it. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp.config.plain import each_name_once
from hf_dp.errors import ConfigurationError
from hf_dp.figures import row_in_words

# With columns: CSV and TSV with a header, a JSON list, JSON lines, parquet.
WITH_COLUMNS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
_OTHER_THAN_TSV = (
    "In TSV no field has a tab or an end of line, and quotes are text, but for those around all texts of a column, or "
    'around each that has quotes within, doubled (""). Save the file as CSV, or as JSON lines'
)

_SEPARATED = "separate columns by commas (in a .tsv file by tabs), with quotes around a text that has some"


def read_text(path: str | Path) -> str:
    """A file of UTF-8 text, with or without a byte order mark.

    Raises:
        ConfigurationError: there is none, or it is something else.
    """
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        way = "Save it as UTF-8, for example with: iconv -f LATIN1 -t UTF-8"
        raise unreadable(str(path), f"bytes that are no UTF-8 text ({error.reason} at {error.start})", way) from error


def _bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        way = f"Names are looked up from the working directory, {str(Path.cwd())!r}: give a whole path"
        raise unreadable(str(path), "no file", way) from error
    except (OSError, ValueError) as error:
        raise unreadable(str(path), str(error), "Give a file that you may read") from error


def unreadable(name: str, found: str, way: str) -> ConfigurationError:
    """The refusal of a file, with what was found in it and the way out."""
    return ConfigurationError(
        f"{name!r} cannot be read: {found}.", why="all of it is needed, and nothing is guessed.", fix=f"{way}."
    )


def rows_of_file(path: Path) -> list[dict[str, Any]]:
    """All rows of a file with columns.

    Raises:
        ConfigurationError: it cannot be read, has another ending, or a row without columns or with too many.
    """
    if path.suffix not in WITH_COLUMNS:
        raise unreadable(
            str(path), f"the ending {path.suffix!r}", "Give CSV or TSV with a header, JSON, JSON lines or parquet"
        )
    content = _bytes(path) if path.suffix == ".parquet" else read_text(path)
    try:
        rows = _of_parquet(content) if isinstance(content, bytes) else _parsed(content, path.suffix)
    except (ValueError, RecursionError, csv.Error) as error:
        way = _OTHER_THAN_TSV if path.suffix == ".tsv" else "Correct it"
        raise unreadable(str(path), str(error), way) from error
    wrong = next((number for number, row in enumerate(rows) if not isinstance(row, dict) or None in row), None)
    if wrong is not None:
        found = f"{row_in_words(wrong)}, which has no columns, or more than the header"
        way = (
            _SEPARATED
            if isinstance(rows[wrong], dict) and _is_of_others(rows[wrong])
            else "correct or take out the row"
        )
        raise unreadable(str(path), found, way)
    return rows


def check_columns(
    name: str, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], others: Sequence[str] = (), *, fix: str
) -> None:
    """Refuses rows, or none, that lack what is read of them.

    Args:
        name: where they are from.
        texts: columns that must hold a text in each row.
        others: that must hold something in each row.
        fix: how other columns are named.

    Raises:
        ConfigurationError: no rows, or one without one of these columns.
    """
    missing = [column for column in (*texts, *others) if not rows or column not in rows[0]]
    if missing:
        if rows and _is_of_others(rows[0]):
            fix = f"{_SEPARATED}."
        raise ConfigurationError(
            f"{name} has no column {missing[0]!r} (it has {', '.join(map(str, rows[0])) if rows else 'no rows'}).",
            why="it is read.",
            fix=fix,
        )
    for number, row in enumerate(rows):
        for column in (*texts, *others):
            value = row.get(column)
            if value is None or (column in texts and not isinstance(value, str)):
                raise ConfigurationError(
                    f"{name} has {'nothing' if value is None else type(value).__name__} in column {column!r} of "
                    f"{row_in_words(number)}.",
                    why="it is read, and no row is left out: n would be another one.",
                    fix="correct or take out the row, or name another column.",
                )


def _is_of_others(row: Mapping[Any, Any]) -> bool:
    """Whether the header is one name that holds what other programs put between columns."""
    names = [name for name in row if name is not None]
    return len(names) == 1 and re.search(r"[;\t|]", str(names[0])) is not None


def _check_once(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"a column twice in the header: {', '.join(map(str, names))[:200]}")


def _check_tsv(names: Sequence[str], rows: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuses what a reader of quotes, as CSV has them, would read as other rows.

    A quote in the middle of a field, or at one end alone, is text, as long as every row has all columns: a field of
    several lines makes rows that have fewer, but for one of a single column, or with tabs as well. So where a reader of
    quotes finds all columns too, both have to find as many rows: what one person wrote is one row.

    Raises:
        ValueError: a row that lacks columns, or quotes around lines.
    """
    for number, row in enumerate(rows):
        if None in row.values():
            few = "has fewer columns than the header, as of a field of several lines"
            raise ValueError(f"{row_in_words(number)} {few}")
    try:
        others = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True) if row]
    except csv.Error:
        return
    if len(others) != len(rows) + 1 and all(len(row) == len(names) for row in others):
        raise ValueError("quotes begin in one line and end in another")


def _without_quotes(fields: Sequence[str]) -> list[str]:
    """The fields of one column, or of the header, as whoever wrote them meant them; each of them stays one field.

    A program puts all texts of a column in quotes, or those that have a quote within, which it doubles. What is written
    neither way could mean both.

    Raises:
        ValueError: some are in quotes, and not for such a reason.
    """
    quoted = [_is_quoted(field) for field in fields]
    if not any(quoted):
        return list(fields)
    by_need = all(
        is_quoted and '"' in field[1:-1] for field, is_quoted in zip(fields, quoted, strict=True) if '"' in field
    )
    if not (all(quoted) or by_need):
        one = next(field for field, is_quoted in zip(fields, quoted, strict=True) if is_quoted)
        raise ValueError(f"{one[:60]!r} is quoted as in CSV, and others like it are not")
    return [
        field[1:-1].replace('""', '"') if is_quoted else field for field, is_quoted in zip(fields, quoted, strict=True)
    ]


def _is_quoted(field: str) -> bool:
    """In quotes, and those inside twice, so that CSV has a reading of it."""
    return len(field) > 1 and field[0] == field[-1] == '"' and '"' not in field[1:-1].replace('""', "")


def _of_parquet(content: bytes) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(content))
        rows: list[Any] = table.to_pylist()
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    _check_once(table.column_names)
    return rows


def _parsed(text: str, ending: str) -> list[Any]:
    if ending in (".csv", ".tsv"):
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # of one text
        # A quote that nothing ends would take in the rows that follow. In TSV quotes are text.
        form: dict[str, Any] = {"strict": True} if ending == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        found = csv.DictReader(io.StringIO(text, newline=""), **form)
        rows: list[Any] = []
        try:
            rows.extend(found)
        except csv.Error as error:
            raise ValueError(f"{row_in_words(len(rows))}: {error}") from error
        names = list(found.fieldnames or ())
        _check_once(names)
        if ending == ".tsv" and not any(None in row for row in rows):
            _check_tsv(names, rows, text)
            columns = [_without_quotes([row[name] for row in rows]) for name in names]
            names = _without_quotes(names)
            _check_once(names)
            rows = [dict(zip(names, fields, strict=True)) for fields in zip(*columns, strict=True)]
        return rows
    if text.lstrip().startswith("["):
        rows = json.loads(text, object_pairs_hook=each_name_once)
        return rows
    lines = [line for line in text.split("\n") if line.strip()]
    return [_of_line(line, number) for number, line in enumerate(lines)]


def _of_line(line: str, number: int) -> Any:
    try:
        return json.loads(line, object_pairs_hook=each_name_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{row_in_words(number)}: {error.msg}, at character {error.pos}") from error
