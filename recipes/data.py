"""Rows of a local file, or of a data set on the hub; and texts with labels among them."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import ClassLabel
from hub_names import split_of
from labelled_texts import label_names

from hf_dp.errors import ConfigurationError

_FILES = (".csv", ".json", ".jsonl")


def read_rows(
    name: str, *, split: str, columns: tuple[str, ...], max_examples: int | None = None
) -> list[dict[str, Any]]:
    """All rows of `name`, or the first `max_examples` of them.

    Args:
        name: a CSV file with a header, a JSON list or JSON lines (.json or .jsonl), or a data set as `split_of` has it.
        split: of a data set.
        columns: that must be there. Labels that a data set keeps as numbers with names are given by name, or as None.

    Raises:
        ConfigurationError: what cannot be read, has no rows, or has some without one of these columns.
    """
    rows = _of_file(Path(name)) if Path(name).suffix in _FILES else _of_data_set(name, split, max_examples)
    for column in columns:
        lacking = next((row for row in rows if column not in row), None)
        if not rows or lacking is not None:
            raise ConfigurationError(
                f"{name} has no column {column!r} (it has {', '.join(map(str, lacking)) if lacking else 'no rows'}).",
                why="the recipe reads it.",
                fix="name the columns of your data with --text_column, --label_column and --group_column.",
            )
    return rows[:max_examples]


def _of_file(path: Path) -> list[dict[str, Any]]:
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
        text = path.read_text(encoding="utf-8")
        whole = text.lstrip().startswith("[")
        rows = json.loads(text) if whole else [json.loads(line) for line in text.split("\n") if line.strip()]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a row is no JSON object")
    except (ValueError, csv.Error) as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be read: {error}.",
            why="all rows take part, or the sampling probability would be another one.",
            fix="correct the file; it must be UTF-8.",
        ) from error
    return rows


def _of_data_set(name: str, split: str, max_examples: int | None) -> list[dict[str, Any]]:
    data = split_of(name, split)
    named = {column: kind for column, kind in data.features.items() if isinstance(kind, ClassLabel)}
    some = data if max_examples is None else data.select(range(min(max_examples, len(data))))
    return [{**row, **{column: _named(kind, row[column]) for column, kind in named.items()}} for row in some]


def _named(kind: ClassLabel, number: int | None) -> str | None:
    # -1 is how data sets mark what nobody has labelled, such as the test data of a competition.
    return None if number is None or number < 0 else kind.int2str(number)


def texts(rows: list[dict[str, Any]], column: str, name: str) -> list[str]:
    """One column of the rows of `name`.

    Raises:
        ConfigurationError: a value that is no text.
    """
    found = [row[column] for row in rows]
    strange = next((i for i, value in enumerate(found) if not isinstance(value, str)), None)
    if strange is not None:
        raise ConfigurationError(
            f"row {strange} of {name} has {type(found[strange]).__name__} in the column {column!r}.",
            why="the model reads text.",
            fix="name the column of texts with --text_column, or take out rows that have none.",
        )
    return found


@dataclass(kw_only=True)
class LabelledData:
    """Arguments of recipes that classify."""

    train_file: str = field(
        metadata={"help": "CSV or JSON lines with a text and a label column, or a hub data set; this is private."}
    )
    test_file: str = field(metadata={"help": "Of the same form, for the reported accuracy."})
    labels_file: str | None = field(
        default=None,
        metadata={"help": "JSON list of all label names, which are public; by default a data set's own (ClassLabel)."},
    )
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


def public_labels(recipe: LabelledData) -> list[str]:
    """The names in `labels_file`; without one, those that the training data set declares for its column of labels.

    Such a declaration (`ClassLabel`) is metadata beside the rows, and its author's word that the names are public.

    Raises:
        ConfigurationError: neither is there.
    """
    if recipe.labels_file:
        return label_names(recipe.labels_file)
    is_file = Path(recipe.train_file).suffix in _FILES
    features = {} if is_file else split_of(recipe.train_file, "train").features
    kind = features.get(recipe.label_column)
    if not isinstance(kind, ClassLabel):
        raise ConfigurationError(
            f"no labels_file, and {recipe.train_file} declares no names for the column {recipe.label_column!r}.",
            why="the labels are public and fixed beforehand: a list made from the private data would leak.",
            fix="give a JSON list of all label names with --labels_file. A data set may declare them instead (as a "
            "ClassLabel): then name that column with --label_column.",
        )
    print(f"labels: the {len(kind.names)} names that {recipe.train_file} declares, which are taken to be public")
    return list(kind.names)


def labelled(name: str, split: str, recipe: LabelledData, labels: list[str]) -> dict[str, list[Any]]:
    """Columns text, labels (numbers) and, where the recipe has a column of groups, group.

    Raises:
        ConfigurationError: a column that is missing, or a label that is not in the list.
    """
    columns = (recipe.text_column, recipe.label_column, *([recipe.group_column] if recipe.group_column else []))
    rows = read_rows(name, split=split, columns=columns, max_examples=recipe.max_examples)
    found: dict[str, list[Any]] = {"text": texts(rows, recipe.text_column, name), "labels": []}
    numbers = {label: number for number, label in enumerate(labels)}
    for row in rows:
        label = row[recipe.label_column]
        if label is None or str(label) not in numbers:
            raise ConfigurationError(
                f"{name} has the label {label!r}, which is not in {recipe.labels_file or 'its declared names'}.",
                why="the labels are public and fixed beforehand: a list made from the private data would leak.",
                fix="complete the list, correct --label_column, or take out rows without a label.",
            )
        found["labels"].append(numbers[str(label)])
    return found if recipe.group_column is None else {**found, "group": [str(row[recipe.group_column]) for row in rows]}
