"""Rows of a local file, or of a data set on the hub; and texts with labels among them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from datasets import ClassLabel

from common.arguments import TextArguments
from common.hub_names import split_of
from common.labelled_texts import label_names
from hf_dp.data.files import WITH_COLUMNS, check_columns, rows_of_file
from hf_dp.errors import ConfigurationError
from hf_dp.figures import row_in_words


def naming_columns(recipe: type) -> str:
    """How the columns of one's own data are named, with the flags that the recipe has for that."""
    flags = [f"--{one.name}" for one in fields(recipe) if one.name.endswith("_column")]
    return f"name the columns of your data with {', '.join(flags[:-1])} and {flags[-1]}."


def read_rows(
    name: str,
    *,
    split: str,
    columns: tuple[str, ...],
    others: tuple[str, ...] = (),
    max_examples: int | None = None,
    fix: str = "look at the columns of the file.",
) -> list[dict[str, Any]]:
    """All rows of `name`, or the first `max_examples` of them.

    Args:
        name: a CSV or TSV file with a header, a JSON list or JSON lines (.json or .jsonl), parquet, or a data set as
            `split_of` has it.
        split: of a data set.
        columns: that must hold a text in each row.
        others: that must hold something in each row. Labels that a data set keeps as numbers with names are given by
            name.
        fix: what to do about a column that is not there.

    Raises:
        ConfigurationError: what cannot be read, has no rows, or a row without one of these columns.
    """
    path = Path(name)
    is_file = path.suffix in WITH_COLUMNS or os.path.isfile(path)
    rows = rows_of_file(path) if is_file else _of_data_set(name, split, max_examples)
    rows = rows[:max_examples]
    check_columns(name, rows, columns, others, fix=fix)
    return rows


def _of_data_set(name: str, split: str, max_examples: int | None) -> list[dict[str, Any]]:
    data = split_of(name, split)
    named = {column: kind for column, kind in data.features.items() if isinstance(kind, ClassLabel)}
    some = data if max_examples is None else data.select(range(min(max_examples, len(data))))
    return [{**row, **{column: _named(kind, row[column]) for column, kind in named.items()}} for row in some]


def _named(kind: ClassLabel, number: int | None) -> str | None:
    # -1 is how data sets mark what nobody has labelled, such as the test data of a competition.
    return None if number is None or number < 0 else kind.int2str(number)


@dataclass(kw_only=True)
class LabelledData(TextArguments):
    """Arguments of recipes that classify."""

    train_file: str = field(
        metadata={
            "help": "CSV, TSV, JSON, JSON lines or parquet with a text and a label column, or a hub data set; this is "
            "private."
        }
    )
    test_file: str = field(metadata={"help": "Of the same form, for the reported accuracy."})
    labels_file: str | None = field(
        default=None,
        metadata={"help": "JSON list of all label names, which are public; by default a data set's own (ClassLabel)."},
    )
    text_column: str = "text"
    label_column: str | None = field(
        default=None, metadata={"help": "By default label, or the one column beside that of texts (and of units)."}
    )
    group_column: str | None = field(
        default=None, metadata={"help": "Report accuracy for each of its values in the test file."}
    )
    compare_without_privacy: bool = field(
        default=False, metadata={"help": "Train once more with the ordinary Trainer, for the gap to it."}
    )
    max_length: int = field(default=64, metadata={"help": "Of a text, in tokens; the rest is cut off."})
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many of each split."})


def tell_of_cuts(name: str, lengths: Iterable[int], longest: int, option: str = "--max_length") -> None:
    """Prints how many of the texts are longer than what is read of each."""
    each = list(lengths)
    if longer := sum(length > longest for length in each):
        print(f"{name}: {longer} of {len(each)} rows are cut off after {longest} tokens ({option})")


def public_labels(recipe: LabelledData) -> list[str]:
    """The names in `labels_file`; without one, those that the training data set declares for its column of labels.

    Such a declaration (`ClassLabel`) is metadata beside the rows, and its author's word that the names are public.

    Raises:
        ConfigurationError: neither is there.
    """
    if recipe.labels_file:
        return label_names(recipe.labels_file)
    is_file = Path(recipe.train_file).suffix in WITH_COLUMNS
    features = {} if is_file else split_of(recipe.train_file, "train").features
    declared = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
    column = recipe.label_column or ("label" if "label" in features or len(declared) != 1 else declared[0])
    kind = features.get(column)
    if not isinstance(kind, ClassLabel):
        raise ConfigurationError(
            f"no labels_file, and {recipe.train_file} "
            + ("is a file, which declares no names." if is_file else f"declares no names for the column {column!r}."),
            why="the labels are public and fixed beforehand: a list made from the private data would leak.",
            fix='give a file with a JSON list of all label names, such as ["card", "fee"], with --labels_file. A data '
            "set may declare them instead (as a ClassLabel): then name that column with --label_column.",
        )
    print(f"labels: the {len(kind.names)} names that {recipe.train_file} declares, which are taken to be public")
    return list(kind.names)


def _label_column(name: str, columns: list[str], recipe: LabelledData, unit: str | None) -> str:
    """Where labels are, if nobody said it: what a column is called is public, and each label must be in the list."""
    others = [column for column in columns if column not in (recipe.text_column, unit)]
    if len(others) > 1:
        others = [column for column in others if column != recipe.group_column]
    if "label" in others or len(others) == 1:
        return "label" if "label" in others else others[0]
    raise ConfigurationError(
        f"{name} has the columns {', '.join(map(str, columns))}, and none that is called label.",
        why="which of them holds the labels is not guessed.",
        fix="name it with --label_column.",
    )


def labelled(
    name: str, split: str, recipe: LabelledData, labels: list[str], unit: str | None = None
) -> dict[str, list[Any]]:
    """Columns text, labels (numbers) and, where the recipe has a column of groups, group; and that of units, as it is.

    Raises:
        ConfigurationError: a column that is missing, or a label that is not in the list.
    """
    others = tuple(column for column in (recipe.label_column, recipe.group_column, unit) if column)
    fix, texts = naming_columns(type(recipe)), (recipe.text_column,)
    rows = read_rows(name, split=split, columns=texts, others=others, max_examples=recipe.max_examples, fix=fix)
    # Of all rows: no one's row may decide what is read of the others.
    columns = list(dict.fromkeys(column for row in rows for column in row))
    column = recipe.label_column or _label_column(name, columns, recipe, unit)
    check_columns(name, rows, (), (column,), fix=fix)
    numbers = {label: number for number, label in enumerate(labels)}
    unknown = next((index for index, row in enumerate(rows) if str(row[column]) not in numbers), None)
    if unknown is not None:
        known = recipe.labels_file or "its declared names"
        # What nobody called labels may be names of people.
        shown = f"the label {rows[unknown][column]!r}" if column in (recipe.label_column, "label") else "something"
        raise ConfigurationError(
            f"{name} has {shown} in column {column!r} of {row_in_words(unknown)}, which is not in {known}.",
            why="the labels are public and fixed beforehand: a list made from the private data would leak.",
            fix="complete the list, correct the row, or name another column with --label_column.",
        )
    found = {
        "text": [row[recipe.text_column] for row in rows],
        "labels": [numbers[str(row[column])] for row in rows],
    }
    if recipe.group_column is not None:
        found["group"] = [str(row[recipe.group_column]) for row in rows]
    if unit in (*found, "input_ids", "token_type_ids", "attention_mask", "features"):
        raise ConfigurationError(
            f"--unit {unit}, which is what the recipe calls a column of its own.",
            why="whose a row is would be lost in it.",
            fix="give the column of units another name in the file, such as user.",
        )
    return found if unit is None else {**found, unit: [row[unit] for row in rows]}
