"""Where the rows of each example are, among rows in some other order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """Where the rows of each example are among n rows that lie in some other order.

    Attributes:
        at: (B*k,) where those of the first example are, those of the second, and so on; some come again where an
            example has fewer than k.
        back: (n,) where each row is in `at`.
        used: (B*k,) whether one comes for the first time; None if all do. Where n is 0, (B,): each has a row of zeros.
        blank: (B*k,) whether an example has none at all; None if all have some.
    """

    at: Tensor
    back: Tensor
    used: Tensor | None = None
    blank: Tensor | None = None

    @staticmethod
    def of(owners: Tensor, size: int) -> Order:
        """That of rows of these owners (n,), of so many examples."""
        if not len(owners):
            return Order(owners, owners, owners.new_zeros(size, dtype=torch.bool))
        at, counts = owners.argsort(stable=True), owners.bincount(minlength=size)
        most = int(counts.max())
        if most * size == len(owners):
            return Order(at, at.argsort())
        places, first = torch.arange(most, device=at.device), counts.cumsum(0) - counts
        used = (places < counts[:, None]).flatten()
        index = first[:, None] + places.minimum((counts - 1).clamp_(min=0)[:, None])
        at = at[index.clamp_(max=len(at) - 1).flatten()]
        back = torch.empty_like(owners)
        back[at[used]] = used.nonzero().squeeze(1)
        is_none = counts == 0
        return Order(at, back, used, is_none.repeat_interleave(most) if bool(is_none.any()) else None)
