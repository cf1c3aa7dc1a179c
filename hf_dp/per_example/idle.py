"""Positions at which no example of a micro-batch has a gradient, left out of its factors.

What a classifier reads off one position gives its last layer a gradient there and nowhere else. Autograd multiplies the
zeros of the other positions; of factors they need not be kept, nor norms or sums be made of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dp.per_example.factors import Outer
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.waiting import answers_at_once


def without_idle(outer: Outer) -> Outer:
    """The same gradients of at most half as many positions, or what was given, where fewer are idle.

    An infinity at an idle position would make its example's gradient NaN, whatever is beside it: it stays.
    """
    left, right = outer.left, outer.right
    if not (isinstance(left, Dense) and isinstance(right, Dense) and answers_at_once(outer.device)):
        return outer
    for side, other in ((left, right), (right, left)):
        if _may_be_idle(side.values) and 2 * len(used := _used(side.values, other.values)) <= side.values.shape[1]:
            return Outer(Dense(left.values[:, used]), Dense(right.values[:, used]), outer.scale)
    return outer


def _may_be_idle(values: Tensor) -> bool:
    """Whether half of the positions of (B, T, n) have zeros in the first feature: all that is read as a rule."""
    used = values[:, :, 0].ne(0).any(0)
    return 2 * int(used.sum()) <= len(used) > 1


def _used(values: Tensor, others: Tensor) -> Tensor:
    """(k,) the positions, at least one, where some of `values` (B, T, n) is not 0, or of `others` may be infinite."""
    # NaN is not 0; the norm of large numbers may be infinite too.
    used: Tensor = values.abs().amax(2).ne(0).any(0) | ~torch.linalg.vector_norm(others, dim=2).isfinite().all(0)
    return used.nonzero().squeeze(1) if bool(used.any()) else used.new_zeros(1, dtype=torch.int64)
