"""Sequences of items, one for each user: generated or from a file, as rows of a history and the next item."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from common.comparison import by_rarity, refuse_unknown
from common.labelled_texts import label_names
from hf_dp.data.files import read_text
from hf_dp.errors import ConfigurationError

PADDING = 0
GROUPS = ("rarity", "length", "group")
_LENGTHS = {0: "under 5", 5: "5 to 9", 10: "10 to 19", 20: "20 to 49", 50: "50 or more"}
Row = dict[str, Any]


@dataclass(kw_only=True)
class SequenceData:
    """Which sequences, and how their users are grouped."""

    interactions_file: str | None = field(
        default=None, metadata={"help": "Lines 'user item', in time order; generated data if it is left out."}
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
    users: int = 15000
    items: int = 6000
    genre_share: float = field(
        default=0.6,
        metadata={"help": "Of each generated sequence, from its user's genre; with 0 popularity is all there is."},
    )
    longest: int = 20
    test_users: int = 6000
    group_column: str | None = field(
        default=None,
        metadata={
            "help": "Report HIT@10 by rarity (of the item to be predicted: head, middle and tail are a third of all "
            "training interactions each), length (of the history) or group (the file's third word, in a user's last "
            "line)."
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
        known = None if recipe.items_file is None else label_names(recipe.items_file)
        names, sequences, words = _read(recipe.interactions_file, known)
    sequences = sequences[: recipe.max_examples]
    train, test = (_rows(sequences, recipe.longest, target) for target in (2, 1))
    test = test[: recipe.test_users]
    groups = None
    if recipe.group_column == "rarity":
        seen = [[*row["input_ids"][: sum(row["attention_mask"])], row["labels"]] for row in train]
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


def _read(path: str, known: list[str] | None) -> tuple[list[str], list[list[int]], list[str] | None]:
    """The items' names, in alphabetical order where they are not `known`; the items of each user, numbered from 1,
    users with fewer than 3 left out; and the third word of each one's last line, if all lines have one."""
    lines = [line.split() for line in read_text(path).splitlines()]
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


def _rows(sequences: list[list[int]], longest: int, target: int) -> list[Row]:
    """Items before the `target` last one, padded on the right, and that one as the label."""
    made = []
    for sequence in sequences:
        items = sequence[:-target][-longest:]
        padded = items + [PADDING] * (longest - len(items))
        mask = [1] * len(items) + [0] * (longest - len(items))
        made.append({"input_ids": padded, "attention_mask": mask, "labels": sequence[-target]})
    return made


def item_tokenizer(data: Sequences) -> PreTrainedTokenizerFast:
    """Names of items, spaces between, as their numbers."""
    numbers = {"<padding>": PADDING, **{name: number + 1 for number, name in enumerate(data.names)}}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<padding>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<padding>")


def popularity(data: Sequences) -> Tensor:
    """Each test user's gain from the most frequent targets, the same for everyone (not private: a yardstick)."""
    counts = np.bincount([row["labels"] for row in data.train], minlength=data.items + 1)
    gains = {int(item): 1 / math.log2(rank + 2) for rank, item in enumerate(np.argsort(-counts)[:10])}
    return torch.tensor([gains.get(row["labels"], 0.0) for row in data.test])
