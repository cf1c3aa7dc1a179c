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
from common.files import read_text
from common.labelled_texts import label_names
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
            "help": "JSON list of all items by name, which are public; without it they are numbered as they appear in "
            "interactions_file, and how many there are is taken to be public."
        },
    )
    users: int = 15000
    items: int = 6000
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


@dataclass(frozen=True)
class Sequences:
    """Rows to learn and to test; items are numbered from 1.

    Attributes:
        names: of the items, in order: public ones, or else the numbers.
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
        sequences = generated(min(recipe.users, recipe.max_examples or recipe.users), recipe.items)
    else:
        known = None if recipe.items_file is None else label_names(recipe.items_file)
        sequences, words = _read(recipe.interactions_file, known)
        names = known or [str(number + 1) for number in range(max(max(sequence) for sequence in sequences))]
    sequences = sequences[: recipe.max_examples]
    train, test = (_rows(sequences, recipe.longest, target) for target in (2, 1))
    test = test[: recipe.test_users]
    groups = None
    if recipe.group_column == "rarity":
        seen = [[*row["input_ids"][: sum(row["attention_mask"])], row["labels"]] for row in train]
        groups = by_rarity(np.concatenate(seen), np.array([[row["labels"]] for row in test]))
    elif recipe.group_column == "length":
        names = list(_LENGTHS.values())
        groups = [names[bisect(list(_LENGTHS), len(sequence) - 1) - 1] for sequence in sequences[: len(test)]]
    elif recipe.group_column == "group":
        if words is None:
            raise _no_groups(str(recipe.interactions_file))
        groups = words[: len(test)]
    return Sequences(train, test, names, groups)


def generated(users: int, items: int, genres: int = 40) -> list[list[int]]:
    """Sequences of 8 to 21 items: 60 % of each, and the last two, are from the user's genre."""
    draw = np.random.default_rng(0)
    popularity = 1 / np.arange(1, items + 1) ** 1.1
    genre_of = draw.integers(genres, size=items)
    weights = 1 / np.arange(1, genres + 1) ** 0.5
    members = [np.flatnonzero(genre_of == g) for g in range(genres)]

    def of(chosen: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
        shares = popularity[chosen]
        return draw.choice(chosen, count, p=shares / shares.sum())

    sequences = []
    for genre in draw.choice(genres, users, p=weights / weights.sum()):
        length = int(draw.integers(8, 22))
        own = draw.random(length) < 0.6
        own[-2:] = True
        sequence = np.where(own, of(members[genre], length), of(np.arange(items), length))
        sequences.append([int(item) + 1 for item in sequence])
    return sequences


def _read(path: str, known: list[str] | None) -> tuple[list[list[int]], list[str] | None]:
    """The items of each user, numbered from 1 in order of appearance, users with fewer than 3 left out; and the third
    word of each one's last line, if all lines have one."""
    numbers = {} if known is None else {name: number + 1 for number, name in enumerate(known)}
    users: dict[str, list[int]] = {}
    words: dict[str, str | None] = {}
    for count, line in enumerate(read_text(path).splitlines(), start=1):
        user, item, word, *_ = [*line.split(), None, None, None]
        if user is None or item is None:
            raise ConfigurationError(
                f"line {count} of {path} is {line!r}.", why="it names no user and item.", fix="write 'user item'."
            )
        if known is not None and item not in numbers:
            raise ConfigurationError(
                f"line {count} of {path} has the item {item!r}, which is not in items_file.",
                why="the items are public and fixed beforehand: a list made from the private data would leak.",
                fix="complete the list, or take out the line.",
            )
        users.setdefault(user, []).append(numbers.setdefault(item, len(numbers) + 1))
        words[user] = word
    kept = {user: sequence for user, sequence in users.items() if len(sequence) >= 3}
    if not kept:
        raise ConfigurationError(
            f"no user of {path} has three items.",
            why="the last is for the test, the one before it the target, and a history must be left.",
            fix="give more interactions.",
        )
    found = [word for user in kept if (word := words[user]) is not None]
    return list(kept.values()), found if len(found) == len(kept) else None


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
