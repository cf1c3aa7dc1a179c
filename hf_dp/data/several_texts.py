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


def warn_of_pieces(dataset: Any) -> None:
    """Says whom a promise to rows is made to, where a tokenizer has cut texts into several of them."""
    if are_pieces(dataset):
        ranks.warn(
            logger,
            "Rows of the training data are pieces of one text, by their column %r. What is promised is promised to a "
            "row: to a piece, and much less to a text that is in several (docs/privacy.md). Give each text one row "
            "(without return_overflowing_tokens), or make the text the unit: PrivacyConfig(unit=..., "
            "max_examples_per_unit=...), by a column with a number or name of its own for each text, as %r is not: it "
            "begins anew with each batch of map().",
            _TEXTS,
            _TEXTS,
        )


def are_pieces(dataset: Any) -> bool:
    """Whether rows that were made one after another are of one text, as tokenizers number them; False where no column
    says so."""
    if isinstance(dataset, Dataset):
        # As they were made: in another order, one number may stand beside that of another batch.
        texts = dataset.data.column(_TEXTS).to_pylist() if _TEXTS in dataset.column_names else []
    elif isinstance(dataset, list):
        texts = [row.get(_TEXTS) for row in dataset if isinstance(row, Mapping)]
    else:
        texts = []
    return any(one is not None and one == other for one, other in pairwise(texts))


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
