"""What decides how the rows of a micro-batch are computed, beside what is in them: rows that are alike may share one.

In 16 bits rounding is much, and follows from it: from how wide tensors are, and from whether a mask hides anything at
all, since models leave out one that does not, and attention then adds up in another order (docs/proof.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hf_dp.data.lengths import length_of
from hf_dp.errors import ConfigurationError

IN_16_BITS = (
    "The model computes in 16 bits, and examples are padded unlike: by rounding, the gradient of one can follow from "
    "those beside it (of a few that were tried, %s). Many copies of one text move together, "
    "by as much as there are of them, and the noise does not cover that (docs/proof.md). Where examples may be alike, "
    "give PrivacyConfig(equal_widths=True), pad all to one width that none of them fills, or compute in float32."
)
# By which models tell rows that hold several texts: what grows otherwise somewhere.
_STEPS = {"position_ids": 1, "seq_idx": 0}
_Marks = frozenset[tuple[str, float]]


class Shape(NamedTuple):
    """Of what a collator made of a row, or of the rows of a unit.

    Attributes:
        sizes: of the axes after the first of each tensor.
        marks: what its masks and positions say of all of it at once, and which of its columns are padded.
    """

    sizes: frozenset[tuple[str, tuple[int, ...]]]
    marks: _Marks


def shape_of(rows: Sequence[Any], batch: Mapping[str, Any]) -> Shape:
    """Of `rows`, and the `batch` that a collator made of them alone."""
    tensors = _tensors(batch)
    sizes = frozenset((name, tuple(value.shape[1:])) for name, value in tensors.items())
    # Of what computes fewer places from many (frames of samples), each number shown may hide another number of these.
    is_counted = any(value.is_floating_point() and value.dim() > 1 and "mask" not in n for n, value in tensors.items())
    marks = set[tuple[str, float]]()
    for name, value in tensors.items():
        if value.dim() < 2 or value.numel() == 0:
            continue
        if "mask" in name:
            # Whichever of two values hides, and whatever is added to scores.
            marks |= {(name, float(end)) for end in (value.min(), value.max())}
            if name.endswith("mask") and (is_counted or "global" in name):
                marks |= {(f"{name}, shown", float(n)) for n in value.ne(0).flatten(1).sum(1).unique()}
        for ending, step in _STEPS.items():
            if name.endswith(ending):
                marks.add((name, float(value.diff(dim=-1).ne(step).any())))
        given = [length_of(row[name]) for row in rows if isinstance(row, Mapping) and name in row]
        marks |= {(f"{name}, padded", 1.0)} if any(n < value.shape[1] for n in given) else set()
    return Shape(sizes, frozenset(marks))


def _tensors(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def refuse_other_sizes(collator: str, of_each: Shape, batch: Mapping[str, Any]) -> None:
    """Refuses a micro-batch of another width than each of its examples has by itself (`ConfigurationError`).

    Args:
        collator: its name.
        of_each: the shape that all examples in it have.
        batch: what the collator made of them.
    """
    own, together = dict(of_each.sizes), {name: tuple(value.shape[1:]) for name, value in _tensors(batch).items()}
    unlike = sorted(name for name in {**own, **together} if own.get(name) != together.get(name))
    if unlike:
        raise ConfigurationError(
            f"equal_widths=True, and the data collator {collator} makes {unlike[0]!r} of shape "
            f"{together.get(unlike[0])} for each of several examples, and {own.get(unlike[0])} for one by itself.",
            why="how an example is computed would not follow from itself alone.",
            fix="leave equal_widths out, and pad all examples to one width; or let the collator pad to the longest, or "
            "to a multiple, and draw no widths.",
        )
