"""Examples that are left out of a sum on a device whose answers would have to be waited for: 0 x NaN is 0 there too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_dp.per_example.ieee import full_precision
from hf_dp.per_example.long_sums import AT_ONCE

# Where torch adds up rows by an index that lies on the device.
_BY_INDEX = frozenset({"cuda"})
# Numbers of a gradient that takes longer to start on than to add up, and of so many that are added up at once.
SMALL, SUMMED_AT_ONCE = 1 << 18, 1 << 24
# Of all examples together so many numbers are weighted at once.
WEIGHTED_AT_ONCE = 1 << 26

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
        self._parts: list[Chosen] = []
        self._matrices: dict[tuple[torch.dtype, torch.device], Tensor] = {}

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
        if len(rows) <= AT_ONCE and (len(rows) == 1 or rows.device.type not in _BY_INDEX):
            out.addmv_(self.or_zeros(rows).T, self._coefficients.to(rows))
            return
        # Of all at once what is thrown away would take the memory of two examples.
        step = max(1, WEIGHTED_AT_ONCE // max(1, len(rows)))
        for sums, few in zip(out.split(step), rows.split(step, dim=1), strict=True):
            sums.add_(self.weighted(few))

    def weighted(self, rows: Tensor) -> Tensor:
        """(n,): the sum itself, of several `rows` (B, n)."""
        if len(rows) > AT_ONCE:
            # See `long_sums`: added up one by one, each would be rounded to the whole.
            self._parts = self._parts or [Chosen(few) for few in self._coefficients.split(AT_ONCE)]
            sums = [part.weighted(few) for part, few in zip(self._parts, rows.split(AT_ONCE), strict=True)]
            return torch.stack(sums).sum(0, dtype=torch.float64).to(rows.dtype)
        with full_precision(rows.device):
            return self._product(rows)

    def _product(self, rows: Tensor) -> Tensor:
        if rows.device.type not in _BY_INDEX:
            return self.or_zeros(rows).T @ self._coefficients.to(rows)
        key = rows.dtype, rows.device
        if key not in self._matrices:
            self._matrices[key] = self._chosen_and_others(*key)
        # `rows` need not be copied without the others, whose sum is thrown away.
        product: Tensor = self._matrices[key] @ rows
        return product[0]

    def _chosen_and_others(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The coefficients (2, B): in the first row those of the examples that are chosen, and of no other."""
        number = self.mask.sum()
        begins = torch.stack([torch.zeros_like(number), number, number.new_full((), len(self.mask))])
        order = self.mask.int().argsort(descending=True, stable=True)
        weights = self._coefficients[order].to(dtype)
        return _sparse(begins.to(device), order.to(device), weights.to(device))


def _sparse(begins: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """The matrix (2, B) of which row i has the `values` from begins[i] on, in their `columns`, each in one."""
    with warnings.catch_warnings():
        # That such matrices are in beta, and not checked: it would be waited for.
        warnings.simplefilter("ignore")
        size = len(begins) - 1, len(columns)
        return torch.sparse_csr_tensor(begins, columns, values, size, check_invariants=False)


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
        self._numbers: dict[tuple[torch.dtype, torch.device], int] = {}

    def takes(self, rows: Tensor) -> bool:
        """Whether `rows` (B, n) are such."""
        height, width = rows.shape
        return height > 1 and width <= SMALL and rows.device.type in _BY_INDEX and not rows.is_inference()

    def add_(self, out: Tensor, rows: Tensor) -> None:
        """As of `Chosen.add_weighted_`; `out` has it when this was finished."""
        key, place = (rows.dtype, rows.device), out.data_ptr()
        waiting, held = self._waiting.setdefault(key, {}), self._numbers.get(key, 0)
        # Nothing is added to one place twice at once.
        if place in waiting or held + rows.numel() > SUMMED_AT_ONCE:
            self._finish(waiting)
            held = 0
        self._numbers[key] = held + rows.numel()
        waiting[place] = out, (rows, rows._version)

    def finish(self) -> None:
        """Adds all."""
        for waiting in self._waiting.values():
            self._finish(waiting)

    def _finish(self, waiting: dict[int, tuple[Tensor, _Version]]) -> None:
        if waiting:
            sums, versions = zip(*waiting.values(), strict=True)
            self._refuse_changed(versions)
            total = self._chosen.weighted(torch.cat([rows for rows, _ in versions], dim=1))
            torch._foreach_add_(sums, total.split([out.shape[0] for out in sums]))
            waiting.clear()
