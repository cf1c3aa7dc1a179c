"""Rows that hold several texts each: whom a promise to a row is made to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

import hf_dp.ranks as ranks

logger = logging.getLogger(__name__)

# In which tokenizers say of which text each row is, under `return_overflowing_tokens=True`.
_TEXTS = "overflow_to_sample_mapping"

# So many rows are looked at, and so many tokens must be in both of two: fewer are so by chance.
_LOOKED_AT, _SHARED = 1000, 20


def warn_of_several(batch: Mapping[str, Any], *, are_even: bool) -> None:
    """Says once whom a promise to rows is made to, where they hold several texts each, or pieces of some.

    Args:
        batch: of a few rows.
        are_even: whether all rows are as long, as far as is known.
    """
    if are_even and is_cut(batch):
        ranks.warn(
            logger,
            "All rows have %d tokens, and all of these are learnt, as where texts are put together and cut into blocks "
            "(group_texts of run_clm.py). What is promised is promised to a row: to a block, and less to a text that "
            "lies in several. Where each text is somebody's, give each a row of its own (truncation=True), or cut each "
            "by itself and make the text the unit (docs/privacy.md).",
            batch["labels"].shape[1],
        )
    elif (column := packed_by(batch)) is not None:
        ranks.warn(
            logger,
            "Rows hold several texts each, by their %r. What is promised is promised to a row: to all of its texts "
            "together, which are clipped together, and less than that to a text that is cut in two. Where each text is "
            "somebody's, give each a row of its own (packing=False).",
            column,
        )


def warn_of_pieces(dataset: Any) -> bool:
    """Says whom a promise to rows is made to, where a tokenizer has cut texts into several of them; whether it did."""
    if (told := pieces_by(dataset)) is not None:
        ranks.warn(
            logger,
            "Rows of the training data look like pieces of one text: %s. What is promised is promised to a row: to a "
            "piece, and much less to a text that is in several (docs/privacy.md). Give each text one row (without "
            "return_overflowing_tokens), or make it the unit: PrivacyConfig(unit=..., max_examples_per_unit=...), by a "
            "column with a name of its own for each (not %r, which begins anew with each batch of map).",
            told,
            _TEXTS,
        )
    return told is not None


def pieces_by(dataset: Any) -> str | None:
    """By what rows that were made one after another are told to be of one text; None where nothing says so."""
    texts = _column(dataset, _TEXTS)
    if any(one is not None and one == other for one, other in pairwise(texts)):
        return f"two have one number in their column {_TEXTS!r}"
    ids = [list(row) for row in _column(dataset, "input_ids", _LOOKED_AT) if isinstance(row, (list, tuple))]
    return "one begins as another one ends" if any(_goes_on(one, other) for one, other in pairwise(ids)) else None


def _column(dataset: Any, name: str, most: int | None = None) -> list[Any]:
    """Of the first rows, as they were made: in another order one batch's numbers stand beside another's."""
    if isinstance(dataset, Dataset):
        return dataset.data.column(name).slice(0, most).to_pylist() if name in dataset.column_names else []
    return [row.get(name) for row in dataset[:most] if isinstance(row, Mapping)] if isinstance(dataset, list) else []


def _goes_on(one: list[Any], other: list[Any]) -> bool:
    """Whether a row begins with what ends the one before it, after what begins both (a question, say), and goes on."""
    alike = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    begun, ends = next(alike, len(other)), (_end(one), _end(other))
    head = other[begun : begun + _SHARED]
    return len(head) == _SHARED and any(
        one[i] == head[0] and one[i:last] == other[begun : begun + last - i] and begun + ends[0] - i < ends[1]
        for last in (ends[0], ends[0] - 1)  # a token may close what the last one ends
        for i in range(begun, last - _SHARED + 1)
    )


def _end(row: list[Any]) -> int:
    """Where padding begins, or the token that ends each row."""
    return next((i for i in range(len(row), 0, -1) if row[i - 1] != row[-1]), 0)


def is_cut(batch: Mapping[str, Any]) -> bool:
    """Whether rows are nothing but what is learnt: labels (examples, tokens) are the ids, of which none is hidden."""
    labels, ids, kept = (batch.get(name) for name in ("labels", "input_ids", "attention_mask"))
    if not (isinstance(labels, Tensor) and isinstance(ids, Tensor) and labels.dim() == 2 and len(labels) > 1):
        return False
    return torch.equal(labels, ids) and not (isinstance(kept, Tensor) and bool(kept.eq(0).any()))


def packed_by(batch: Mapping[str, Any]) -> str | None:
    """The column of a batch by which its rows hold several texts each; None where none says so.

    Positions (examples, tokens) that begin anew where a row is attended to, or numbers of its texts, `seq_idx`.
    """
    kept = batch.get("attention_mask")
    for name in ("position_ids", "seq_idx"):
        told = batch.get(name)
        if not isinstance(told, Tensor) or told.dim() != 2:
            continue
        masks = kept if isinstance(kept, Tensor) and kept.shape == told.shape else torch.ones_like(told)
        rows = (row[mask.bool()] for row, mask in zip(told, masks, strict=True))
        if any(_begins_anew(row) if name == "position_ids" else len(row[row >= 0].unique()) > 1 for row in rows):
            return name
    return None


def _begins_anew(positions: Tensor) -> bool:
    # Padding may end a row with zeros, after which none grows.
    steps = positions.diff()
    back = (steps < 0).nonzero()
    return bool(len(back)) and bool((steps[int(back[0]) :] > 0).any())
