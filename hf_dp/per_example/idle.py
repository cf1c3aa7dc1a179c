"""Positions at which no example of a micro-batch has a gradient, left out of its factors.

What a classifier reads off one position gives its last layer a gradient there and nowhere else. Autograd multiplies the
zeros of the other positions; of factors they need not be kept, nor norms or sums be made of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_dp.per_example.factors import Outer
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.routed import Routed
from hf_dp.per_example.waiting import answers_at_once

# Of smaller rows nothing overflows float32 on the way to a norm and the bound on its rounding, in whatever form: not of
# 2^20 positions of 2^20 numbers each.
_LARGE = 2.0**20


def without_idle(outer: Outer) -> Outer:
    """The same gradients of at most half as many positions, or what was given, where fewer are idle.

    Which positions are idle depends on all examples, and so does in which form gradients are kept. So nothing is left
    out beside large numbers, infinities and NaN: whether such an example has a finite norm, and adds anything, follows
    from it alone.
    """
    left, right = outer.left, outer.right
    # Of what one expert was given, other positions are idle than of another's.
    if isinstance(outer, Routed) or not (
        isinstance(left, Dense) and isinstance(right, Dense) and answers_at_once(outer.device)
    ):
        return outer
    for side in (left, right):
        if _may_be_idle(side.values) and 2 * len(used := _used(side.values)) <= side.values.shape[1]:
            if _is_large(left.values) or _is_large(right.values):
                return outer
            return replace(outer, left=Dense(left.values[:, used]), right=Dense(right.values[:, used]))
    return outer


def _may_be_idle(values: Tensor) -> bool:
    """Whether half of the positions of (B, T, n) have zeros in the first feature: all that is read, and mostly of the
    first example alone."""
    first, positions = values.select(2, 0), values.shape[1]
    if len(first) == 0 or positions < 2 or 2 * int(first[0].count_nonzero()) > positions:
        return False
    return 2 * int(first.ne(0).any(0).count_nonzero()) <= positions


def _used(values: Tensor) -> Tensor:
    """(k,) the positions, at least one, where some of `values` (B, T, n) is not 0."""
    # Not by norms, which may be 0 of small numbers.
    used = values.abs().amax(2).ne(0).any(0)
    return used.nonzero().squeeze(1) if bool(used.any()) else used.new_zeros(1, dtype=torch.int64)


def _is_large(values: Tensor) -> bool:
    """Whether a row of (B, T, n) is, or is no number."""
    return not bool(torch.linalg.vector_norm(values, dim=2).lt(_LARGE).all())
