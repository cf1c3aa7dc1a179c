"""Examples that are left out of a sum on a device whose answers would have to be waited for: 0 x NaN is 0 there too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.long_sums import AT_ONCE

# Where torch adds up rows by an index that lies on the device.
_HAS_BAGS = frozenset({"cuda"})
# Numbers of a gradient that takes longer to start on than to add up, and of so many that are added up at once.
_SMALL, _AT_ONCE = 1 << 18, 1 << 24

_Version = tuple[Tensor, int]


class Chosen:
    """A sum over examples, and those that are in it.

    Args:
        coefficients: (B,) of the sum, 0 for those that are left out.
    """

    def __init__(self, coefficients: Tensor) -> None:
        self.mask = coefficients.ne(0)
        self._left_out = ~self.mask
        self._coefficients = coefficients
        self._bags: tuple[Tensor, Tensor] | None = None
        self._parts: list[Chosen] = []
        self._in_order: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def or_zeros(self, values: Tensor) -> Tensor:
        """`values` (B, ...) with zeros in the rows of the others."""
        # A scalar for `where` would be moved to the device first.
        return values.masked_fill(self._left_out.to(values.device).view(-1, *[1] * (values.dim() - 1)), 0)

    def add_weighted_(self, out: Tensor, rows: Tensor) -> None:
        """Adds the sum over those that are chosen of coefficients[i] x rows[i] to `out` (n,).

        Args:
            out: of the dtype of `rows`.
            rows: (B, n).
        """
        if len(rows) <= AT_ONCE and (len(rows) == 1 or rows.device.type not in _HAS_BAGS):
            out.addmv_(self.or_zeros(rows).T, self._coefficients.to(rows))
            return
        out.add_(self.weighted(rows))

    def weighted(self, rows: Tensor) -> Tensor:
        """(n,): the sum itself, of several `rows` (B, n)."""
        if len(rows) > AT_ONCE:
            # See `long_sums`: added up one by one, each would be rounded to the whole.
            self._parts = self._parts or [Chosen(few) for few in self._coefficients.split(AT_ONCE)]
            sums = [part.weighted(few) for part, few in zip(self._parts, rows.split(AT_ONCE), strict=True)]
            return torch.stack(sums).sum(0, dtype=torch.float64).to(rows.dtype)
        if rows.device.type not in _HAS_BAGS:
            return self.or_zeros(rows).T @ self._coefficients.to(rows)
        order, begins = (index.to(rows.device) for index in self._two_bags())
        key = rows.dtype, rows.device
        if key not in self._in_order:
            self._in_order[key] = self._coefficients.to(rows)[order]
        # The others are in a bag of their own, which is thrown away: `rows` need not be copied without them, which of
        # a single one would be cheaper.
        return F.embedding_bag(order, rows, begins, mode="sum", per_sample_weights=self._in_order[key])[0]

    def _two_bags(self) -> tuple[Tensor, Tensor]:
        """The numbers of all examples, those that are chosen first, and where these and the others begin."""
        if self._bags is None:
            number = self.mask.sum()
            order = self.mask.int().argsort(descending=True, stable=True)
            self._bags = order, torch.stack([torch.zeros_like(number), number])
        return self._bags


class Together:
    """Sums of small gradients where each by itself would take longer to start than to make: several are made at once.

    Args:
        chosen: the sum.
        refuse_changed: is given what has waited, and which version of it is to be added. In the second of two passes
            autograd goes on meanwhile, and a rule may have handed on the very gradient that it goes on with.
    """

    def __init__(self, chosen: Chosen, refuse_changed: Callable[[Sequence[_Version]], None]) -> None:
        self._chosen, self._refuse_changed = chosen, refuse_changed
        self._waiting: dict[tuple[torch.dtype, torch.device], dict[int, tuple[Tensor, _Version]]] = {}

    def takes(self, rows: Tensor) -> bool:
        """Whether `rows` (B, n) are such."""
        return not rows.is_inference() and len(rows) > 1 and rows.shape[1] <= _SMALL and rows.device.type in _HAS_BAGS

    def add_(self, out: Tensor, rows: Tensor) -> None:
        """As of `Chosen.add_weighted_`; `out` has it when this was finished."""
        waiting = self._waiting.setdefault((rows.dtype, rows.device), {})
        held = sum(rows.numel() for _, (rows, _) in waiting.values())
        # Nothing is added to one place twice at once.
        if out.data_ptr() in waiting or held + rows.numel() > _AT_ONCE:
            self._finish(waiting)
        waiting[out.data_ptr()] = out, (rows, rows._version)

    def finish(self) -> None:
        """Adds all."""
        for waiting in self._waiting.values():
            self._finish(waiting)

    def _finish(self, waiting: dict[int, tuple[Tensor, _Version]]) -> None:
        if waiting:
            sums, versions = zip(*waiting.values(), strict=True)
            self._refuse_changed(versions)
            total = self._chosen.weighted(torch.cat([rows for rows, _ in versions], dim=1))
            torch._foreach_add_(sums, total.split([len(out) for out in sums]))
            waiting.clear()
