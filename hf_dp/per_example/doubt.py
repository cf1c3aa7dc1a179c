"""What rounding may do to the norm and the sum of left^T right, since products are added up in float32.

In whichever order n products are added up in float32, the sum is off by at most n / 2 of its epsilons of the sum of
absolute values (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 3.1), and by a good part of that
where all are alike, or small beside the first.

The product of two 16-bit numbers is exact in float32. CUDA's tensor cores add such products up in float32 and cut the
sums, where float32 rounds them. They align g products and the sum to the largest of these, cut there, with e bits more
than float32, and cut the new sum: at most g 2^-e + 1 epsilons of the sum of absolute values (bit-accurate models of
Khattak and Mikaitis 2025, arXiv:2512.07004: Hopper g = 16, e = 2; Ampere g = 8, e = 1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dp.per_example.products import BLOCK, CUT_BLOCK, SHORT_BLOCK, are_multiplied_as_they_are, instantiated_from

# An upper bound for both: so many epsilons for each so many products.
_CUT, _AT_ONCE = 5, 8
# A weighted factor, as the sum of two bfloat16 numbers, is off by 2^-18 of itself: in float32's epsilons of 2^-23, and
# twice of its square.
_SPLIT = 2 * 2**5


class Doubt(NamedTuple):
    """How the norm and the sum of left^T right are made.

    Attributes:
        widths: p and d, 0 for a side of ids.
        on_cores: whether tensor cores make the Gram matrix of either side, and what is added to a sum.
        is_kept: whether gradients are instantiated. Then nothing is in doubt of those which would be beside any others;
            the rest has what it has where it is not.
    """

    widths: tuple[int, int] = (0, 0)
    on_cores: tuple[bool, bool, bool] = (False, False, False)
    is_kept: bool = False

    @classmethod
    def of(cls, left: Tensor, right: Tensor, is_kept: bool = False) -> Doubt:
        """Of factors: (B, T, p) or (B, T) the ids of one, and (B, T, d)."""
        left_width, right_width = (side.shape[2] if side.dim() == 3 else 0 for side in (left, right))
        is_left = left_width > 0 and are_multiplied_as_they_are(left, left)
        is_right = right_width > 0 and are_multiplied_as_they_are(right, right)
        on_cores = is_left, is_right, is_left and is_right and are_multiplied_as_they_are(left, right)
        return cls((left_width, right_width), on_cores, is_kept)


NO_DOUBT = Doubt()


def unsure(doubt: Doubt, used: Tensor) -> Tensor | float:
    """How far the squared norm may be from that of what is added to a sum, since products are added up in float32.

    Args:
        doubt: of what.
        used: (..., B, T) at which positions neither side is zero. All that counts is how many these are (others may be
            left out), or on tensor cores how far they reach, so that an example has the same beside any others.

    Returns:
        In epsilons of (sum over positions of |left| |right|)^2, (..., B) or of all.
    """
    sides = 0.0
    for width, is_cut in zip(doubt.widths, doubt.on_cores, strict=False):
        longest = CUT_BLOCK if is_cut else SHORT_BLOCK
        block = min(width, longest)
        # Within a block, and where blocks are added.
        sides += (_cut(block) if is_cut else block / 2) + width / longest
    if not (all(doubt.widths) and used.shape[-1]):
        return sides
    if doubt.on_cores[2]:
        places = torch.arange(1, used.shape[-1] + 1, device=used.device)
        summed = ((used * places).amax(-1) + (used * places.flip(0)).amax(-1) - len(places)).clamp_min(0)
        # They may begin within what is multiplied at once.
        sums = 2 * _CUT * (summed.clamp_max(BLOCK) / _AT_ONCE + 2) + _SPLIT
    else:
        summed = used.sum(-1, dtype=torch.float32)
        sums = summed.clamp_max(SHORT_BLOCK) + summed / SHORT_BLOCK
    always = instantiated_from(math.prod(doubt.widths), sum(doubt.widths), doubt.on_cores[2])
    return (sides + sums).masked_fill(summed >= always, 0.0) if doubt.is_kept else sides + sums


def _cut(length: int) -> int:
    return _CUT * math.ceil(length / _AT_ONCE)
