"""Sequences of items, one for each user: generated or from a file, as rows of a history and the next item."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from common.comparison import by_rarity, refuse_unknown
from common.labelled_texts import label_names
from hf_dp.data.files import WITH_COLUMNS, check_columns, read_text, rows_of_file
from hf_dp.errors import ConfigurationError

PADDING = 0
NOTHING = -100
GROUPS = ("rarity", "length", "group")
_LENGTHS = {0: "under 5", 5: "5 to 9", 10: "10 to 19", 20: "20 to 49", 50: "50 or more"}
Row = dict[str, Any]


@dataclass(kw_only=True)
class SequenceData:
    """Which sequences, and how their users are grouped."""

    interactions_file: str | None = field(
        default=None,
        metadata={
            "help": "Lines 'user item' in time order, or CSV, TSV, JSON, JSON lines or parquet with columns; generated "
            "data if it is left out."
        },
    )
    items_file: str | None = field(
        default=None,
        metadata={
            "help": "JSON list of all items by name, which are public: for interactions_file, whose lines are private."
        },
    )
    items_are_public: bool = field(
        default=False,
        metadata={"help": "In place of items_file: which items occur in interactions_file is public knowledge."},
    )
    user_column: str = "user"
    item_column: str = "item"
    time_column: str | None = field(
        default=None, metadata={"help": "Numbers, or dates as ISO 8601 has them; without it rows are in time order."}
    )
    users: int = 15000
    items: int = 6000
    genre_share: float = field(
        default=0.6,
        metadata={"help": "Of each generated sequence, from its user's genre; with 0 popularity is all there is."},
    )
    longest: int = 20
    new_items_only: bool = field(
        default=False, metadata={"help": "Nobody takes an item twice, as with films: what was seen is never the next."}
    )
    targets: int = field(default=1, metadata={"help": "How many of a user's last items are learnt from, in one loss."})
    test_users: int = 6000
    group_column: str | None = field(
        default=None,
        metadata={
            "help": "Report HIT@10 by rarity (of the item to be predicted: head, middle and tail are a third of all "
            "training interactions each), length (of the history) or group (the file's third word, or its column "
            "group, in a user's last line)."
        },
    )
    max_examples: int | None = field(default=None, metadata={"help": "Use only the first so many users."})

    def __post_init__(self) -> None:
        refuse_unknown("group_column", [] if self.group_column is None else [self.group_column], GROUPS)
        if self.group_column == "group" and self.interactions_file is None:
            raise _no_groups("generated data")
        if (self.interactions_file is not None) != (self.items_file is not None or self.items_are_public):
            raise _no_items(self)


@dataclass(frozen=True)
class Sequences:
    """Rows to learn and to test; items are numbered from 1.

    Attributes:
        names: of the items, in order: public ones, or the numbers of generated items.
        groups: of each test row, if they were asked for.
    """

    train: list[Row]
    test: list[Row]
    names: list[str]
    groups: list[str] | None

    @property
    def items(self) -> int:
        """How many there are."""
        return len(self.names)


def load(recipe: SequenceData) -> Sequences:
    """The last item of each user is the test, the one before it the target of training.

    Raises:
        ConfigurationError: a line without user and item, no user with three items, or no groups where they are asked.
    """
    words = None
    if recipe.interactions_file is None:
        names = [str(number + 1) for number in range(recipe.items)]
        sequences = generated(min(recipe.users, recipe.max_examples or recipe.users), recipe.items, recipe.genre_share)
    else:
        known = None if recipe.items_file is None else list(map(_one_word, label_names(recipe.items_file)))
        names, sequences, words = _read(recipe.interactions_file, _lines(recipe, recipe.interactions_file), known)
    sequences = sequences[: recipe.max_examples]
    train = _rows(sequences, recipe.longest, 2, recipe.targets)
    test = _rows(sequences[: recipe.test_users], recipe.longest, 1)
    groups = None
    if recipe.group_column == "rarity":
        seen = [sequence[:-1][-recipe.longest - 1 :] for sequence in sequences]
        groups = by_rarity(np.concatenate(seen), np.array([[row["labels"]] for row in test]))
    elif recipe.group_column == "length":
        lengths = list(_LENGTHS.values())
        groups = [lengths[bisect(list(_LENGTHS), len(sequence) - 1) - 1] for sequence in sequences[: len(test)]]
    elif recipe.group_column == "group":
        if words is None:
            raise _no_groups(str(recipe.interactions_file))
        groups = words[: len(test)]
    return Sequences(train, test, names, groups)


def generated(users: int, items: int, share: float = 0.6, genres: int = 40) -> list[list[int]]:
    """Sequences of 8 to 21 items: a share of each, and the last two, are from the user's genre, if there is a share."""
    draw = np.random.default_rng(0)
    popularity = 1 / np.arange(1, items + 1) ** 1.1
    genre_of = draw.integers(genres, size=items)
    weights = 1 / np.arange(1, genres + 1) ** 0.5
    members = [found if len(found := np.flatnonzero(genre_of == g)) else np.arange(items) for g in range(genres)]

    def of(chosen: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        shares = popularity[chosen]
        return draw.choice(chosen, count, p=shares / shares.sum())

    sequences = []
    for genre in draw.choice(genres, users, p=weights / weights.sum()):
        length = int(draw.integers(8, 22))
        own = draw.random(length) < share
        own[-2:] = share > 0
        sequence = np.where(own, of(members[genre], length), of(np.arange(items), length))
        sequences.append([int(item) + 1 for item in sequence])
    return sequences


def _lines(recipe: SequenceData, path: str) -> list[list[str]]:
    """Words of each line, user and item first, in time order; spaces in names as underscores."""
    if Path(path).suffix not in WITH_COLUMNS:
        return [line.split() for line in read_text(path).splitlines()]
    named = [recipe.user_column, recipe.item_column, *([] if recipe.time_column is None else [recipe.time_column])]
    rows = rows_of_file(Path(path))
    check_columns(path, rows, (), named, fix="name them with --user_column, --item_column and --time_column.")
    if recipe.time_column is not None:
        times = _times(path, [row[recipe.time_column] for row in rows])
        rows = [rows[place] for place in sorted(range(len(rows)), key=times.__getitem__)]
    columns = (*named[:2], "group")
    return [[_one_word(str(row[name])) for name in columns if name in row] for row in rows]


def _one_word(name: str) -> str:
    return "_".join(name.split())


def _times(path: str, values: list[Any]) -> list[float]:
    for read in (float, lambda value: datetime.fromisoformat(value).timestamp()):
        try:
            found = [read(value) for value in values]
        except (TypeError, ValueError):
            continue
        if all(map(math.isfinite, found)):
            return found
    raise ConfigurationError(
        f"--time_column of {path} holds something else than numbers alone, or dates alone.",
        why="who took what last is the test, and is not guessed.",
        fix="write numbers, such as seconds since 1970, or dates such as 2026-11-25T10:00:00, in every row.",
    )


def _read(
    path: str, lines: list[list[str]], known: list[str] | None
) -> tuple[list[str], list[list[int]], list[str] | None]:
    """The items' names, in alphabetical order where they are not `known`; the items of each user, numbered from 1,
    users with fewer than 3 left out; and the third word of each one's last line, if all lines have one."""
    names = sorted({line[1] for line in lines if len(line) > 1}) if known is None else known
    numbers = {name: number + 1 for number, name in enumerate(names)}
    users: dict[str, list[int]] = {}
    words: dict[str, str | None] = {}
    for count, line in enumerate(lines, start=1):
        user, item, word, *_ = [*line, None, None, None]
        if user is None or item is None:
            raise ConfigurationError(
                f"line {count} of {path} is {' '.join(line)!r}.",
                why="it names no user and item.",
                fix="write 'user item'.",
            )
        if item not in numbers:
            raise ConfigurationError(
                f"line {count} of {path} has the item {item!r}, which is not in items_file.",
                why="the items are public and fixed beforehand: a list made from the private data would leak.",
                fix="complete the list, or take out the line.",
            )
        users.setdefault(user, []).append(numbers[item])
        words[user] = word
    kept = {user: sequence for user, sequence in users.items() if len(sequence) >= 3}
    if not kept:
        raise ConfigurationError(
            f"no user of {path} has three items.",
            why="the last is for the test, the one before it the target, and a history must be left.",
            fix="give more interactions.",
        )
    found = [word for user in kept if (word := words[user]) is not None]
    return names, list(kept.values()), found if len(found) == len(kept) else None


def _no_items(data: SequenceData) -> ConfigurationError:
    if data.interactions_file is None:
        return ConfigurationError(
            "--items_file or --items_are_public without --interactions_file.",
            why="generated items are numbered, and nothing would heed it.",
            fix="give the interactions too, or leave it out.",
        )
    return ConfigurationError(
        f"--interactions_file {data.interactions_file} without --items_file.",
        why="the model has a row for each item, and a list made from private lines tells which items occur in them.",
        fix="give --items_file, a JSON list of all items that could occur; or, where it is known to all which do, "
        "--items_are_public true.",
    )


def _no_groups(source: str) -> ConfigurationError:
    return ConfigurationError(
        f"--group_column group with {source}.",
        why="there is no group in it for each user.",
        fix="write 'user item group' in each line of interactions_file, or choose rarity or length.",
    )


def _rows(sequences: list[list[int]], longest: int, target: int, targets: int = 1) -> list[Row]:
    """Items before the `target` last one, padded on the right, and that one as the label; of several `targets` a list
    of those up to it, with the position `after` which each follows, and -100 where there is none."""
    made = []
    for sequence in sequences:
        items = sequence[:-target][-longest:]
        padded = items + [PADDING] * (longest - len(items))
        mask = [1] * len(items) + [0] * (longest - len(items))
        row: Row = {"input_ids": padded, "attention_mask": mask, "labels": sequence[-target]}
        if targets > 1:
            count = min(targets, len(items))
            known = [*items, sequence[-target]][-count:]
            row["labels"] = known + [NOTHING] * (targets - count)
            row["after"] = [*range(len(items) - count, len(items)), *[0] * (targets - count)]
        made.append(row)
    return made


def item_tokenizer(data: Sequences) -> PreTrainedTokenizerFast:
    """Names of items, spaces between, as their numbers."""
    numbers = {"<padding>": PADDING, **{name: number + 1 for number, name in enumerate(data.names)}}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<padding>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<padding>")


def popularity(data: Sequences, only_new: bool = False) -> Tensor:
    """Each test user's gain from the most frequent targets, or those that the history lacks (not private: a
    yardstick)."""
    targets = np.concatenate([np.atleast_1d(row["labels"]) for row in data.train])
    counts = np.bincount(targets[targets > 0], minlength=data.items + 1)
    ranks = np.argsort(np.argsort(-counts))
    found = []
    for row in data.test:
        seen = set(row["input_ids"]) - {row["labels"]} if only_new else set()
        rank = ranks[row["labels"]] - sum(ranks[item] < ranks[row["labels"]] for item in seen)
        is_hit = rank < 10 and not (only_new and row["labels"] in row["input_ids"])
        found.append(1 / math.log2(rank + 2) if is_hit else 0.0)
    return torch.tensor(found)
