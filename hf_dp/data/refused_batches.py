"""What a data collator may return: a dict of tensors, with a row for each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hf_dp.data.failing_rows import A_DICT
from hf_dp.errors import ConfigurationError

_PADDED = (
    "use a padding collator (for example transformers.DataCollatorWithPadding) with return_tensors='pt', without "
    "packing or padding_free, that returns tensors of shape (examples, ...) only. Several images of an example are its "
    "row (examples, images, ...), for models that take them so; others take one each."
)
_SHARED = (
    "return tensors of shape (examples, ...) only, without packing. What is the same whatever the rows are (weights of "
    "classes, a scale) give the model, or compute_per_example_loss, as an attribute, or repeat it for each row: "
    "shared.expand(len(rows), *shared.shape)."
)


def refuse_other_than_rows(name: str, batch: Any, size: int) -> None:
    """Refuses what is no mapping of tensors that have a row for each example.

    Args:
        name: of the collator.
        batch: what it made.
        size: of so many examples.

    Raises:
        ConfigurationError: with the name of the tensor.
    """
    if not isinstance(batch, Mapping):
        raise ConfigurationError(
            f"the data collator {name} returned {type(batch).__name__}, not a mapping of names to tensors.",
            why="the model is called with the names of its inputs, and each must have a row for each example.",
            fix=A_DICT,
        )
    others = {key: value for key, value in batch.items() if not isinstance(value, Tensor)}
    if len(others) == len(batch):
        raise _refused(name, f"returned no torch tensor, only {list(batch)}")
    for key, value in others.items():
        if (found := _hidden(value, size)) is not None:
            raise ConfigurationError(
                f"the data collator {name} returned {key!r} as {found}.",
                why="rows of single examples are taken out of what a batch holds by name, of tensors and of lists with "
                "an entry for each example, and of nothing else: each would be given what belongs to the others too.",
                fix="return each of its tensors under a name of its own, torch.as_tensor(...) of an array, and let the "
                "model's forward(), or compute_per_example_loss(model, inputs), put them together again.",
            )
    for key, value in batch.items():
        if key in others:
            continue
        if value.dim() == 0:
            raise _refused(name, f"returned the single number {key!r} for {size} examples", _SHARED)
        if value.shape[0] != size:
            way = _SHARED if value.dim() == 1 else _PADDED
            raise _refused(name, f"returned {key!r} of shape {tuple(value.shape)} for {size} examples", way)


def _hidden(value: Any, size: int) -> str | None:
    """Where in a value of a batch there are rows that would not be found, if there are."""
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {value.shape}" if _has_rows(value) else None
    is_list = isinstance(value, list)
    if not isinstance(value, (Mapping, tuple, list)) or (is_list and len(value) == size) or not _has_rows(value):
        return None
    return f"a {type(value).__name__} {f'of {len(value)}, with tensors' if is_list else 'with tensors'} in it"


def _has_rows(value: Any) -> bool:
    if isinstance(value, (Mapping, tuple, list)):
        return any(map(_has_rows, value.values() if isinstance(value, Mapping) else value))
    # Names beside the rows are no input of a model.
    return isinstance(value, Tensor) or (
        isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "biufc"
    )


def refuse_packing(collate: Any) -> None:
    """Refuses collators that are known to put several examples in one row.

    Raises:
        ConfigurationError: with its name.
    """
    while collate is not None:
        names = [kind.__name__ for kind in type(collate).__mro__]
        if "DataCollatorWithFlattening" in names or getattr(collate, "padding_free", False):
            raise _refused(name_of(collate), "puts several examples in one row")
        # Trainer's column remover, among others, holds the user's collator under this name.
        collate = getattr(collate, "data_collator", None)


def name_of(collate: Any) -> str:
    """Of the user's collator."""
    return str(getattr(collate, "__qualname__", type(collate).__qualname__))


def _refused(name: str, problem: str, way: str = _PADDED) -> ConfigurationError:
    return ConfigurationError(
        f"the data collator {name} {problem}.",
        why="each example's gradient is clipped on its own, so each must have its own row; packed or padding-free rows "
        "and values shared between examples mix them.",
        fix=way,
    )
