"""Examples that are left out of a sum on a device whose answers would have to be waited for: 0 x NaN is 0 there too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Where torch adds up rows by an index that lies on the device.
_HAS_BAGS = frozenset({"cuda"})


class Chosen:
    """Those that are summed.

    Args:
        mask: (B,).
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._bags: tuple[Tensor, Tensor] | None = None

    def or_zeros(self, values: Tensor) -> Tensor:
        """`values` (B, ...) with zeros in the rows of the others."""
        left_out = ~self.mask.to(values.device).view(-1, *[1] * (values.dim() - 1))
        # A scalar for `where` would be moved to the device first.
        return values.masked_fill(left_out, 0)

    def add_weighted_(self, out: Tensor, rows: Tensor, coefficients: Tensor) -> None:
        """Adds the sum over those that are chosen of coefficients[i] x rows[i] to `out` (n,).

        Args:
            out: of the dtype of `rows`, as are the `coefficients`.
            rows: (B, n).
            coefficients: (B,), 0 for the others.
        """
        if len(rows) == 1 or rows.device.type not in _HAS_BAGS:
            out.addmv_(self.or_zeros(rows).T, coefficients)
            return
        order, begins = (index.to(rows.device) for index in self._two_bags())
        # The others are in a bag of their own, which is thrown away: `rows` need not be copied without them, which of
        # a single one would be cheaper.
        bags = F.embedding_bag(order, rows, begins, mode="sum", per_sample_weights=coefficients[order])
        out.add_(bags[0])

    def _two_bags(self) -> tuple[Tensor, Tensor]:
        """The numbers of all examples, those that are chosen first, and where these and the others begin."""
        if self._bags is None:
            number = self.mask.sum()
            order = self.mask.int().argsort(descending=True, stable=True)
            self._bags = order, torch.stack([torch.zeros_like(number), number])
        return self._bags
