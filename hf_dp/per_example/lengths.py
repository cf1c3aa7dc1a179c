"""The lengths of the rows that a gradient is a sum over: what rounding may have done to it follows from them.

A clipping coefficient follows from that bound, and must follow from the example alone. So it is the same, but for its
own rounding, in whatever form the gradient is kept, which depends on all examples of a micro-batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_dp.per_example.doubt import NO_DOUBT, Doubt, unsure

# Rounding of a squared norm, in units of machine epsilon x (sum over positions of |left| |right|)^2, but for that of
# products (`unsure`).
_ROUNDING = 8.0
# Where the squares of numbers, in sums of 2^20, are no longer represented; in units of the root of the largest number.
_LARGEST = 2.0**-11


@dataclass(frozen=True)
class Lengths:
    """Of the rows of an outer product's sides, or of what is summed over positions.

    Attributes:
        left: (B, T) l2 norms, or (k, B, T) those of k uses that are alike.
        right: beside it; None where there is one side alone.
        scale: of the gradient.
        doubt: how its norm and its sum are made.
    """

    left: Tensor
    right: Tensor | None = None
    scale: float = 1.0
    doubt: Doubt = NO_DOUBT

    @property
    def likeness(self) -> Hashable:
        """What those have in common of which magnitudes are taken at once."""
        return self.left.device, self.left.dtype, self.left.shape, self.right is None, self.scale, self.doubt

    def scaled(self, scale: float) -> Lengths:
        return replace(self, scale=self.scale * abs(scale))

    def to(self, dtype: torch.dtype) -> Lengths:
        return replace(self, left=self.left.to(dtype), right=None if self.right is None else self.right.to(dtype))

    def selected(self, index: Tensor) -> Lengths:
        """The examples in `index` alone."""
        return replace(self, left=self.left[index], right=None if self.right is None else self.right[index])

    def magnitude(self) -> Tensor:
        """(B,), or (k, B): what the norm would be if nothing cancelled between positions, and more where it is taken
        less exactly. Positions at which either side is zero (padding) change nothing, unless the other one is beyond
        10^10 there."""
        largest = _LARGEST * torch.finfo(self.left.dtype).max ** 0.5
        if self.right is None:
            total = self.left.sum(-1)
            return (self.scale * total).masked_fill(total > largest, math.inf)
        products, of_left, of_right = self.left * self.right, self.left.sum(-1), self.right.sum(-1)
        total = products.sum(-1)
        times = 1 + unsure(self.doubt, products.ne(0)) / _ROUNDING
        # Each entry of a Gram matrix may have lost as much as the smallest normal number in each of its products.
        limits = torch.finfo(total.dtype)
        lost = self.doubt.widths[0] * of_right.square() + self.doubt.widths[1] * of_left.square()
        magnitude: Tensor = (times * total.square() + lost * (limits.tiny / (_ROUNDING * limits.eps))).sqrt()
        # Gram matrices overflow where gradients do not yet.
        return (self.scale * magnitude).masked_fill(total + of_left + of_right > largest, math.inf)


@functools.lru_cache(1024)
def most_times(doubt: Doubt, positions: int) -> float:
    """How many times as much rounding an example has at most as it would have if products were added up exactly."""
    everywhere = torch.ones(1, positions, dtype=torch.bool)
    return 1.0 + float(unsure(doubt._replace(is_kept=False), everywhere)) / _ROUNDING


def magnitudes(several: Sequence[Lengths]) -> list[Tensor]:
    """Those of each, (k, B) of all that are alike: a GPU takes long to start on each by itself."""
    alike: dict[Hashable, list[Lengths]] = {}
    for one in several:
        alike.setdefault(one.likeness, []).append(one)
    return [joined(together).magnitude() for together in alike.values()]


def joined(alike: Sequence[Lengths]) -> Lengths:
    """Of k uses that are alike, (k, B, T)."""
    right = None if alike[0].right is None else torch.stack([one.right for one in alike if one.right is not None])
    return replace(alike[0], left=torch.stack([one.left for one in alike]), right=right)


def rounding(*uses: Tensor) -> Tensor:
    """A bound on the rounding error of a squared norm, from the magnitudes of the uses of one parameter."""
    return _ROUNDING * max(torch.finfo(use.dtype).eps for use in uses) * of_all(*uses).square()


def of_all(*uses: Tensor) -> Tensor:
    """The magnitude (B,) of one parameter from those of its uses."""
    if len(uses) == 1:
        return uses[0]
    # One that an example has no part in adds nothing: loops over positions have more beside longer examples.
    return sum(uses[1:], start=uses[0]) * more_times(sum(use.ne(0) for use in uses[1:])) ** 0.5


def more_times(more: Tensor | int) -> Tensor | float:
    """As `most_times`, of so many further uses: each that is added rounds the sum of all once more, and that which a
    norm is taken of."""
    return 1.0 + 2 * more / _ROUNDING
