"""Rows of a local file, or of a data set on the hub; and texts with labels among them."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dp.errors import ConfigurationError


def read_rows(
    name: str,
    *,
    split: str,
    columns: tuple[str, ...],
    others: tuple[str, ...] = (),
    max_examples: int | None = None,
) -> list[dict[str, Any]]:
    """All rows of `name`, or the first `max_examples` of them.

    Args:
        name: a CSV file with a header, a JSON list or JSON lines (.json or .jsonl), or a data set on the hub.
        split: of a data set on the hub.
        columns: that must hold a text in each row.
        others: that must hold something in each row. Labels that the hub keeps as numbers with names are given by name.

    Raises:
        ConfigurationError: a file that cannot be read, an empty one, or a row without one of these columns.
    """
    path = Path(name)
    is_file = path.suffix in (".json", ".jsonl", ".csv")
    if not is_file and path.is_file():
        raise _unreadable(name, f"the ending {path.suffix!r}", "Give CSV with a header, JSON or JSON lines")
    try:
        rows = _from_file(path) if is_file else _from_hub(name, split)
    except (ValueError, RecursionError, csv.Error) as error:
        raise _unreadable(name, str(error), "Correct it") from error
    wrong = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict) or None in row), None)
    if wrong is not None:
        raise _unreadable(
            name, f"row {wrong}, which has no columns, or more than the header", "Correct or take out the row"
        )
    missing = [column for column in (*columns, *others) if not rows or column not in rows[0]]
    if missing:
        raise ConfigurationError(
            f"{name} has no column {missing[0]!r} (it has {', '.join(rows[0]) if rows else 'no rows'}).",
            why="the recipe reads it.",
            fix="name the columns of your data with --text_column, --label_column and --group_column.",
        )
    rows = rows[:max_examples]
    for number, row in enumerate(rows, 1):
        for column in (*columns, *others):
            value = row.get(column)
            if value is None or (column in columns and not isinstance(value, str)):
                raise ConfigurationError(
                    f"{name} has {'nothing' if value is None else type(value).__name__} in column {column!r} of row "
                    f"{number}.",
                    why="the recipe reads it, and leaves out no row: n would be another one.",
                    fix="correct or take out the row.",
                )
    return rows


def _from_file(path: Path) -> list[Any]:
    text = read_text(path)
    if path.suffix == ".csv":
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # of one text
        return list(csv.DictReader(io.StringIO(text, newline="")))
    if text.lstrip().startswith("["):
        rows: list[Any] = json.loads(text)
        return rows
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_text(path: str | Path) -> str:
    """A file of UTF-8 text, with or without a byte order mark.

    Raises:
        ConfigurationError: there is none, or it is something else.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        way = "Save it as UTF-8, for example with: iconv -f LATIN1 -t UTF-8"
        raise _unreadable(str(path), f"bytes that are no UTF-8 text ({error.reason} at {error.start})", way) from error
    except FileNotFoundError as error:
        way = f"Names in a recipe are looked up from the working directory, {str(Path.cwd())!r}: give a whole path"
        raise _unreadable(str(path), "no file", way) from error
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), str(error), "Give a file that you may read") from error


def _unreadable(name: str, found: str, way: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} cannot be read: {found}.", why="the recipe needs all of it, and guesses at nothing.", fix=f"{way}."
    )


def _from_hub(name: str, split: str) -> list[dict[str, Any]]:
    from datasets import ClassLabel, load_dataset

    data = load_dataset(name, split=split)
    named = {column: kind for column, kind in data.features.items() if isinstance(kind, ClassLabel)}
    return [{**row, **{column: kind.int2str(row[column]) for column, kind in named.items()}} for row in data]


@dataclass(kw_only=True)
class LabelledData:
    """Arguments of recipes that classify."""

    train_file: str = field(
        metadata={"help": "CSV or JSON lines with a text and a label column, or a hub data set; this is private."}
    )
    test_file: str = field(metadata={"help": "Of the same form, for the reported accuracy."})
    labels_file: str = field(metadata={"help": "JSON list of all label names; they are public."})
    text_column: str = "text"
    label_column: str = "category"
    group_column: str | None = field(
        default=None, metadata={"help": "Report accuracy for each of its values in the test file."}
    )
    compare_without_privacy: bool = field(
        default=False, metadata={"help": "Train once more with the ordinary Trainer, for the gap to it."}
    )
    max_length: int = 64
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many of each split."})


def labelled(name: str, split: str, recipe: LabelledData, labels: list[str]) -> dict[str, list[Any]]:
    """Columns text, labels (numbers) and, where the recipe has a column of groups, group.

    Raises:
        ConfigurationError: a column that is missing, or a label that is not in the list.
    """
    others = (recipe.label_column, *([recipe.group_column] if recipe.group_column else []))
    rows = read_rows(name, split=split, columns=(recipe.text_column,), others=others, max_examples=recipe.max_examples)
    unknown = next((row[recipe.label_column] for row in rows if row[recipe.label_column] not in labels), None)
    if unknown is not None:
        raise ConfigurationError(
            f"{name} has the label {unknown!r}, which is not in {recipe.labels_file}.",
            why="the labels are public and fixed beforehand: a list made from the private data would leak.",
            fix="complete the list, or correct --label_column.",
        )
    found = {
        "text": [row[recipe.text_column] for row in rows],
        "labels": [labels.index(row[recipe.label_column]) for row in rows],
    }
    return found if recipe.group_column is None else {**found, "group": [str(row[recipe.group_column]) for row in rows]}
