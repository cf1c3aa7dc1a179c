"""Tasks with large embedding tables, for the recipe sparse_embeddings.

`banking77`: a pretrained encoder, all of it trained, word embeddings included. `table`: a table as large as XLM-R's
under an encoder of one layer, on generated long-tailed text. `stream`: categorical features whose frequent values drift
from period to period, generated; each period has its own examples, so the epsilon of one training holds for each of
them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, DataCollatorWithPadding

from common import classification
from common.comparison import Collator, by_rarity, collate, refuse_unknown
from common.hub_names import pretrained
from common.labelled_texts import label_names
from common.plain_classifier import as_sequence_classification
from common.results import CLASSIFY

Rows = Any
_TABLE = """import torch; from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(DIRECTORY)
print(model(torch.tensor([list(range(16))])).logits)  # of (texts, 16) ids"""
_STREAM = """import torch; from safetensors.torch import load_file; features = torch.tensor([[1, 2, 3]])  # (n, 3) ids
w = load_file(DIRECTORY + "/model.safetensors"); x = sum(w[f"tables.{i}.weight"][features[:, i]] for i in range(3))
print((x @ w["head.0.weight"].T + w["head.0.bias"]).relu() @ w["head.2.weight"].T + w["head.2.bias"])"""
# As in recipes/classify_full.yaml.
_HEAD_SCALE = 8.0


@dataclass(kw_only=True)
class TaskArguments:
    """What is trained on."""

    task: Literal["banking77", "table", "stream"] = "stream"
    examples: int = field(default=20000, metadata={"help": "Generated, in each period."})
    periods: int = 4
    rows: int = field(default=1_000_000, metadata={"help": "Of the largest table that is generated for."})
    seed_of_data: int = 0
    group_column: str | None = field(
        default=None,
        metadata={
            "help": "Report accuracy by a column of banking77's test file, or, for generated tasks, by rarity: whether "
            "the median id of an example is of the head, the middle or the tail, a third of all occurrences each."
        },
    )
    max_examples: int | None = field(
        default=None, metadata={"help": "Use only the first so many of each split; shrinks tables too."}
    )
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    train_file: str = "../shared/data/banking77/train.csv"
    test_file: str = "../shared/data/banking77/test.csv"
    labels_file: str = "../shared/data/banking77/categories.json"
    head_learning_rate: float = 1e-2

    def __post_init__(self) -> None:
        if self.task != "banking77" and self.group_column is not None:
            refuse_unknown("group_column", [self.group_column], ["rarity"])
        if self.max_examples is not None:
            self.examples = min(self.max_examples, self.examples)
            self.rows = min(100 * self.max_examples, self.rows)


@dataclass
class Task:
    """One comparison.

    Attributes:
        model: makes a model, the same each time.
        periods: training and test rows of each.
        collate: rows to a batch.
        tables: the embedding tables' names.
        groups: of the test rows of all periods, one after the other, if they were asked for.
        usage: Python that loads what is saved and uses it, with DIRECTORY for where.
        tokenizer: if the rows were texts.
        plain: makes of a trained model the one that is saved, if Transformers cannot load it as it is.
        head_learning_rate: of a head that is made of the labels' names; None without one.
    """

    model: Callable[[], nn.Module]
    periods: list[tuple[Rows, Rows]]
    collate: Collator
    tables: tuple[str, ...]
    groups: list[str] | None
    usage: str
    tokenizer: Any = None
    plain: Callable[[nn.Module], Any] | None = None
    head_learning_rate: float | None = None


def banking77(recipe: TaskArguments) -> Task:
    """Questions of bank customers, 77 intents."""
    names = ("train_file", "test_file", "labels_file", "encoder", "group_column", "max_examples")
    given: dict[str, Any] = {name: getattr(recipe, name) for name in names}
    parts = classification.EncoderClassifier(method="full", head_scale=_HEAD_SCALE, **given)
    tokenizer, labels = pretrained(AutoTokenizer, recipe.encoder), label_names(recipe.labels_file)
    tokenizer.model_max_length = parts.max_length
    splits = {"train": recipe.train_file, "test": recipe.test_file}
    train, test = (classification.read(path, split, parts, tokenizer, labels) for split, path in splits.items())
    train, test, groups = classification.apart(train, test)
    return Task(
        lambda: classification.build(parts, tokenizer, labels),
        [(train, test)],
        DataCollatorWithPadding(tokenizer),
        ("encoder.embeddings.word_embeddings.weight",),
        groups,
        CLASSIFY,
        tokenizer,
        lambda model: as_sequence_classification(copy.deepcopy(model), labels),
        recipe.head_learning_rate / _HEAD_SCALE,
    )


def zipf(draw: torch.Generator, rows: int, *shape: int) -> Tensor:
    """Ranks from 1 to rows - 1, the r-th with a probability in proportion to 1 / r."""
    return torch.exp(torch.rand(*shape, generator=draw) * math.log(rows)).long().clamp(1, rows - 1)


def table(recipe: TaskArguments) -> Task:
    """Long-tailed text of 16 tokens; the label is a vote of its tokens."""
    draw, rows = torch.Generator().manual_seed(recipe.seed_of_data), min(recipe.rows, 250_000)
    votes = torch.randn(rows, 4, generator=draw)

    def text(n: int) -> list[dict[str, Any]]:
        ids = zipf(draw, rows, n, 16)
        labels = votes[ids].sum(1).argmax(1)
        return [{"input_ids": a, "labels": b} for a, b in zip(ids.tolist(), labels.tolist(), strict=True)]

    width = 768 if recipe.max_examples is None else 64
    config = BertConfig(
        vocab_size=rows, hidden_size=width, num_hidden_layers=1, num_attention_heads=width // 64,
        intermediate_size=width, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    periods = [(text(recipe.examples), text(2000))]
    return Task(
        lambda: BertForSequenceClassification(config),
        periods,
        collate,
        ("bert.embeddings.word_embeddings.weight",),
        rarities(recipe, periods, "input_ids"),
        _TABLE,
    )


class Features(nn.Module):
    """Clicks from three categorical features, by the sum of their embeddings."""

    def __init__(self, sizes: tuple[int, ...], width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        self.head = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 2))
        for embedding in self.tables:
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, features: Tensor) -> Tensor:
        """(B, 3) ids to (B, 2) logits."""
        summed = sum(embedding(features[:, i]) for i, embedding in enumerate(self.tables))
        logits: Tensor = self.head(summed)
        return logits


def stream(recipe: TaskArguments) -> Task:
    """In each period half of the frequent values are new ones."""
    draw, sizes = torch.Generator().manual_seed(recipe.seed_of_data), (recipe.rows, recipe.rows // 10, 1000)
    effects = [2 * torch.randn(size, generator=draw) for size in sizes]
    places = [torch.randperm(size, generator=draw) for size in sizes]

    def rows_of(n: int) -> list[dict[str, Any]]:
        ids = [place[zipf(draw, len(place), n)] for place in places]
        score = sum(effect[chosen] for effect, chosen in zip(effects, ids, strict=True))
        labels = (score + torch.randn(n, generator=draw) > 0).long()
        features = torch.stack(ids, dim=1)
        return [{"features": f, "labels": b} for f, b in zip(features.tolist(), labels.tolist(), strict=True)]

    periods = []
    for _ in range(recipe.periods):
        periods.append((rows_of(recipe.examples), rows_of(4000)))
        for place in places:
            moved = torch.arange(1, min(2000, len(place)), 2)
            others = torch.randint(1, len(place), moved.shape, generator=draw)
            place[moved] = place[others]
    names = tuple(f"tables.{i}.weight" for i in range(len(sizes)))
    groups = rarities(recipe, periods, "features", starts=(0, sizes[0], sizes[0] + sizes[1]))
    return Task(lambda: Features(sizes), periods, collate, names, groups, _STREAM)


def rarities(
    recipe: TaskArguments, periods: list[tuple[Rows, Rows]], column: str, starts: tuple[int, ...] = (0,)
) -> list[str] | None:
    """How rare the ids in a column of each test row are, by those of its period's training rows, if it is asked for.

    Args:
        starts: what to add to the ids of a row where each is of a table of its own.
    """
    if recipe.group_column is None:
        return None
    arrays = [[np.array([row[column] for row in part]) + np.array(starts) for part in both] for both in periods]
    return [group for train, test in arrays for group in by_rarity(train, test)]


TASKS = {"banking77": banking77, "table": table, "stream": stream}
