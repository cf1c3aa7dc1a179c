"""Training data that cannot be drawn from example by example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hf_dp.config.ranges import shown
from hf_dp.data.first_seen import left_as_it_was
from hf_dp.errors import ConfigurationError
from hf_dp.randomness import unchanged_global_state


def refuse_dataset(dataset: Any) -> None:
    """Refuses training data that cannot be drawn from example by example.

    Raises:
        ConfigurationError: with its type.
    """
    kind = type(dataset).__name__
    if dataset is None:
        raise ConfigurationError(
            "no train_dataset.",
            why="there is nothing to train on.",
            fix="pass the training examples (train_dataset=..., a datasets.Dataset or a list of rows).",
        )
    if isinstance(dataset, str):
        raise ConfigurationError(
            f"train_dataset is the text {shown(dataset)}.",
            why="its length is the number of its letters, not of examples.",
            fix="load the examples, for example datasets.load_dataset(...)['train'].",
        )
    if isinstance(dataset, Mapping):
        raise ConfigurationError(
            f"train_dataset is {kind} with the keys {', '.join(map(str, dataset))}.",
            why="its length is the number of its parts, not of its examples.",
            fix="pass one of its parts, for example train_dataset=data['train']; the first rows of a Dataset are "
            "data.select(range(400)), since data[:400] is its columns; of columns, such as a tokenizer gives, "
            "datasets.Dataset.from_dict(...) makes rows.",
        )
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            f"the training data are {kind}, which draws batches by itself.",
            why="epsilon holds for batches of a Poisson sampler, which is hf_dp's own.",
            fix="give its dataset (loader.dataset), and its collate_fn as the collator; the size of batches is an "
            "argument of its own.",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ConfigurationError(
            f"train_dataset is {kind}, which can only be iterated.",
            why="Poisson sampling draws every example independently, so it needs their number and access by index.",
            fix="use a map-style dataset (for a streamed one: Dataset.from_generator or without streaming=True).",
        )
    try:
        n = len(dataset)
        if n:
            with unchanged_global_state(), left_as_it_was(dataset):
                dataset[n - 1]
        again = len(dataset)
    except (LookupError, TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ConfigurationError(
            f"train_dataset is {kind}, whose last example cannot be read, or that has no length "
            f"({type(error).__name__}: {shown(error)}).",
            why="the sampling probability follows from its length, and each example must be there when it is drawn.",
            fix="correct __len__ and __getitem__ so that dataset[len(dataset) - 1] is its last example; make a "
            "dataset of a pandas table (datasets.Dataset.from_pandas).",
        ) from error
    if again != n:
        raise ConfigurationError(
            f"train_dataset is {kind}, whose length was {n} and then {again}.",
            why="the sampling probability follows from it, and must be the same in the whole run.",
            fix="make a dataset of fixed length: one epoch's rows, or all rows with random choices in __getitem__.",
        )
