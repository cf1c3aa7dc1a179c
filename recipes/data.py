"""Rows of a local file, or of a data set on the hub; and texts with labels among them."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dp.errors import ConfigurationError


def read_rows(
    name: str, *, split: str, columns: tuple[str, ...], max_examples: int | None = None
) -> list[dict[str, Any]]:
    """All rows of `name`, or the first `max_examples` of them.

    Args:
        name: a CSV file with a header, a file of JSON lines (.json or .jsonl), or a data set on the hub.
        split: of a data set on the hub.
        columns: that must be there. Labels that the hub keeps as numbers with names are given by name.

    Raises:
        ConfigurationError: an empty file, or one without one of these columns.
    """
    path = Path(name)
    if path.suffix in (".json", ".jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    elif path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = _from_hub(name, split)
    missing = [column for column in columns if not rows or column not in rows[0]]
    if missing:
        raise ConfigurationError(
            f"{name} has no column {missing[0]!r} (it has {', '.join(rows[0]) if rows else 'no rows'}).",
            why="the recipe reads it.",
            fix="name the columns of your data with --text_column, --label_column and --group_column.",
        )
    return rows[:max_examples]


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
    columns = (recipe.text_column, recipe.label_column, *([recipe.group_column] if recipe.group_column else []))
    rows = read_rows(name, split=split, columns=columns, max_examples=recipe.max_examples)
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
