"""Units that were put into the data, each by a coin, to see whether a training gives them away."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dp.errors import ConfigurationError, shortened

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
Coins = np.ndarray[Any, np.dtype[np.bool_]]
# The label that cross-entropy leaves out; other losses count it as a number.
IGNORED = -100
_LABELS = ("labels", "label")


@dataclass(frozen=True)
class Planted:
    """A dataset with canaries.

    Attributes:
        dataset: to train on: the rows that it was made of, and then a row for each canary; labels that were names of
            classes are their numbers.
        places: (m,), at which row each canary is.
        included: (m,), whether it is there; else its row holds nothing. Not for the training to know.
    """

    dataset: Dataset
    places: np.ndarray[Any, np.dtype[np.int64]]
    included: Coins

    def split(self, scores: Any) -> tuple[Any, Any]:
        """Of (m,) scores those of the canaries that were in, and of those that were not: what `one_run` takes."""
        found = np.asarray(scores)
        return found[self.included], found[~self.included]


def coins(number: int) -> Coins:
    """Fair ones (m,), from the operating system: no seed of a training has a part in them."""
    return np.random.default_rng().random(number) < 0.5


def unlabelled(row: Mapping[str, Any]) -> Row:
    """The row with labels that cross-entropy, of classes or tokens, leaves out: it adds nothing to a gradient then.

    Of labels that are whole numbers and mean something else (stars of a regression, several classes at once) it is not
    true, and nobody is told: give `nothing` to `plant` there.

    Raises:
        ConfigurationError: it has no labels, or labels that are not whole numbers.
    """
    name = next((name for name in _LABELS if name in row), None)
    if name is None:
        raise ConfigurationError(
            f"a canary without labels ({', '.join(map(str, row))}).",
            why="when the coin keeps it out, its row must add nothing, and which row does so is not known here.",
            fix="give plant(..., nothing=): from the canary's row to one without a loss; for a collator that makes "
            "labels of the tokens that is one of padding alone.",
        )
    try:
        labels = np.asarray(row[name])
    except ValueError:  # lists of different lengths
        labels = np.asarray(None)
    if not np.issubdtype(labels.dtype, np.integer):
        raise ConfigurationError(
            f"a canary whose labels are {shortened(str(row[name]))}.",
            why=f"when the coin keeps it out, its row must add nothing: label {IGNORED} does so for classes "
            "and tokens, which are whole numbers, and for others it would be a target far from all.",
            fix="give plant(..., nothing=): from the canary's row to one without a loss.",
        )
    return {**row, name: np.full(labels.shape, IGNORED).tolist()}


def _signed(feature: Any) -> Any:
    """The feature with whole numbers of either sign, where its own would not take the label that is left out."""
    from datasets import ClassLabel, Value

    if isinstance(feature, ClassLabel) or (isinstance(feature, Value) and feature.dtype.startswith("uint")):
        return Value("int64")
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_signed(feature.feature))
    return feature


def plant(
    dataset: Dataset,
    canaries: Sequence[Mapping[str, Any]],
    *,
    nothing: Callable[[Mapping[str, Any]], Row] = unlabelled,
    unit: str | None = None,
) -> Planted:
    """Puts each canary into the data if a fair coin says so, and a row that holds nothing if not.

    So n is the same whatever the coins say, each canary is a unit of n, and what a coin changes is what the claim is
    about (one unit replaced by nothing). A canary that is there twice is two, with a coin each.

    Args:
        canaries: rows with the dataset's columns.
        nothing: from a canary's row, as the dataset's columns hold it, to one without a loss. By default its labels
            are left out, which is for cross-entropy over classes or tokens.
        unit: the column of the promise's units, where these are no rows: each canary needs a value of its own there.

    Raises:
        ConfigurationError: none, other columns, or a value of `unit` that is not the canary's own.
    """
    from datasets import Dataset, concatenate_datasets

    rows = [dict(row) for row in canaries]
    columns = {name for row in rows for name in row}
    if not rows or any(set(row) != set(dataset.column_names) for row in rows):
        raise ConfigurationError(
            f"{len(rows)} canaries with {', '.join(sorted(columns)) or 'nothing'}, for a dataset with "
            f"{', '.join(sorted(dataset.column_names))}.",
            why="they would be told from the data by their columns, before anything is trained.",
            fix="give rows with all of the dataset's columns and no others.",
        )
    if unit is not None:
        own = [row[unit] for row in rows]
        if len(set(own)) < len(own) or set(own) & set(dataset[unit]):
            raise ConfigurationError(
                f"canaries that share a value of {unit!r} with each other, or with rows of the data.",
                why="one coin must decide of the whole unit: half of one is no neighbour of anything.",
                fix=f"give each canary a {unit} of its own.",
            )
    # A column of other numbers holds a whole one as such.
    rows = Dataset.from_list(rows, features=dataset.features).to_list()
    empty = [nothing(row) for row in rows]
    if unit is not None:
        empty = [{**row, unit: canary[unit]} for row, canary in zip(empty, rows, strict=True)]
    features = dataset.features.copy()
    features.update({name: _signed(features[name]) for name in _LABELS if name in features})
    if features != dataset.features:
        dataset = dataset.cast(features)
    # All that the coins choose between, before they are thrown: a refusal must not depend on one.
    Dataset.from_list(empty, features=features)
    included = coins(len(rows))
    planted = [row if is_in else out for row, out, is_in in zip(rows, empty, included, strict=True)]
    added = Dataset.from_list(planted, features=features)
    return Planted(concatenate_datasets([dataset, added]), np.arange(len(rows)) + len(dataset), included)


def random_labels(
    rows: Sequence[Mapping[str, Any]],
    labels: Sequence[Any],
    generator: np.random.Generator,
    column: str | None = None,
) -> list[Row]:
    """These rows, each with a label drawn from `labels`: only who saw the canary knows it.

    Args:
        column: of labels; by default `labels`, or `label` where rows have that.

    Raises:
        ConfigurationError: they are columns.
    """
    if isinstance(rows, Mapping):
        raise ConfigurationError(
            f"rows is {type(rows).__name__} with the keys {', '.join(map(str, rows))}.",
            why="a canary is one row, and these are columns, as of data[:200] where data is a Dataset.",
            fix="give rows: data.select(range(200)), or list(data)[:200].",
        )
    if column is None:
        column = next((name for name in _LABELS if any(name in row for row in rows)), _LABELS[0])
    return [{**row, column: labels[int(generator.integers(len(labels)))]} for row in rows]


def random_tokens(number: int, length: int, vocabulary: int, generator: np.random.Generator) -> list[Row]:
    """Rows of `length` tokens below `vocabulary`, with themselves as labels, for language models."""
    drawn = generator.integers(vocabulary, size=(number, length)).tolist()
    return [{"input_ids": ids, "labels": list(ids)} for ids in drawn]


def random_texts(
    number: int, length: int, generator: np.random.Generator, letters: str = string.ascii_letters + string.digits
) -> list[str]:
    """Texts like no text: random letters."""
    return ["".join(letters[i] for i in row) for row in generator.integers(len(letters), size=(number, length))]
