"""Pictures among the tokens of a text: each row of a batch has the places for its own, and for no others.

Models put what they see into the tokens that stand for it in the order of the whole batch, and look at the totals
alone: where one row has a place too few and another one too many, the pictures of one are seen by another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.batch import Batch, batch_size

# What stands for it in a model's config, and what a batch may hold of it.
_KINDS = {"image": ("pixel_values",), "video": ("pixel_values_videos",), "audio": ("input_features", "input_values")}
_FIX = (
    "give every example as many places as its pictures need (raise max_length, or leave out what is cut off), or set "
    "per_device_train_batch_size=1."
)


def not_blank(images: Tensor) -> Tensor:
    """(B,): how many of (B, N, C, H, W) are not all zero, as images are that fill up an example."""
    return images.ne(0).flatten(2).any(2).sum(1)


def check_pictures(model: nn.Module, batch: Batch) -> None:
    """Refuses rows that may see the pictures (or sounds) of others.

    Raises:
        UnsupportedModelError: places that are not in proportion to the pictures of each row; or in models of which that
            would say nothing, since a picture takes more or fewer places by its size, several rows at once.
    """
    ids, config = batch.get("input_ids"), getattr(model, "config", None)
    if not isinstance(ids, Tensor) or batch_size(batch) == 1:
        return
    for kind, names in _KINDS.items():
        token = next((t for end in ("id", "index") if (t := _token(config, f"{kind}_token_{end}")) is not None), None)
        given = next((v for name in names if isinstance(v := batch.get(name), Tensor)), None)
        if token is None or given is None:
            continue
        sized = [name for name in batch if "sizes" in name or "grid" in name or "spatial" in name]
        if kind != "image" or sized or given.dim() not in (4, 5):
            if not bool(ids.eq(token).any()):
                continue
            raise UnsupportedModelError(
                f"{kind}s among the tokens of several rows at once, which take places by their sizes"
                f"{f' ({sized[0]})' if sized else ''}.",
                why="nothing tells whose each is: one row may see those of another.",
                fix="set per_device_train_batch_size=1.",
            )
        places = ids.eq(token).sum(1)
        pictures = not_blank(given) if given.dim() == 5 else torch.ones_like(places)
        # The one number that is read: a GPU is waited for.
        if bool((places * pictures.sum() != pictures * places.sum()).any()):
            raise UnsupportedModelError(
                f"rows with {places.tolist()} places for {pictures.tolist()} pictures.",
                why="the model fills all places of a micro-batch in their order, so one row would see the pictures of "
                "another.",
                fix=_FIX,
            )


def _token(config: Any, name: str) -> int | None:
    found = getattr(config, name, None)
    return found if isinstance(found, int) else None
