"""Numbers that count passes, and what they may become."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.state import named_place
from hf_dp.per_example.checks.values import same

# Beyond what any training counts, and 0 by most numbers that something is done every so many times: by all up to 16,
# and by 50, 100 and 1000.
_MANY = 18_018_000


def refuse_counts(
    found: Mapping[tuple[str, Any], tuple[Any, Any]], are_alike: Callable[[dict[Any, Any], dict[Any, Any]], bool]
) -> None:
    """Refuses counts that losses follow from, however many passes later.

    Args:
        found: by place, what a batch has left there, and what it left when it passed once more: nothing else than
            before is a cache, say.
        are_alike: whether losses are the same with the first values in their places as with the second.

    Raises:
        UnsupportedModelError: with the name of one.
    """
    for place, (left, again) in found.items():
        if same(again, left) or all(are_alike({place: left}, {place: number}) for number in many(left)):
            continue
        raise UnsupportedModelError(
            f"{named_place(place)} counts the passes through the model, or their examples, and losses follow from how "
            "many there were.",
            why="how many a step takes follows from the examples that were drawn: one more could change the gradients "
            "of all that come after it.",
            fix="count the optimizer's steps instead, in a callback, or leave it as it is in training.",
        )


def is_whole(value: Any) -> bool:
    """Whether it can be a count: one whole number, of any type."""
    if isinstance(value, (bool, np.bool_)):
        return False
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and value.layout is torch.strided and not value.is_meta
        return is_one and value.dtype != torch.bool and not value.is_complex() and is_whole(value.item())
    if isinstance(value, np.ndarray):
        return value.size == 1 and is_whole(value.reshape(-1)[0].item())
    return isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value) and value == int(value)


def many(value: Any) -> list[Any]:
    """What a count may be after a long training, as it is read and one pass before; nothing of what counts nothing."""
    if not is_whole(value):
        return []
    return [found for number in (_MANY, _MANY - 1) if (found := _of_kind(value, number)) is not None]


def _of_kind(value: Any, number: int) -> Any:
    if isinstance(value, (int, float)):
        return type(value)(number) if type(value) in (int, float) else None
    is_short = (
        not value.dtype.is_floating_point and torch.iinfo(value.dtype).max < number
        if isinstance(value, Tensor)
        else value.dtype.kind in "iu" and np.iinfo(value.dtype).max < number
    )
    if is_short:
        return None
    return torch.full_like(value, number) if isinstance(value, Tensor) else np.full_like(value, number)[()]
