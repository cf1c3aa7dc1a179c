"""Gradients of embedding tables by the rows that were looked up: nothing of a table's size is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.factors import DistinctRows, Factors, Outer
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.long_sums import united
from hf_dp.per_example.precision import accumulation, sum_dtype
from hf_dp.per_example.waiting import answers_at_once

# How many numbers of looked-up rows wait on a device, each row as often as it was looked up, until they are united.
_WAITING = 1 << 25


@dataclass(frozen=True)
class Tables:
    """Embedding tables whose rows are numbered through: row r of the second is V_1 + r.

    Attributes:
        sizes: the number of rows V of each, by the name of its parameter.
        widths: their numbers of columns d.
    """

    sizes: Mapping[str, int]
    widths: Mapping[str, int]

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor]) -> Tables:
        """The tables with these (V, d) parameters.

        Raises:
            UnsupportedModelError: one of them is in shards.
        """
        for name, p in parameters.items():
            if isinstance(p, DTensor):
                raise UnsupportedModelError(
                    f"{name} is to have a sparse private gradient, and is in shards.",
                    why="rows are looked up, chosen and get their noise in whole tables.",
                    fix="train under DDP, leave the table out of fully_shard, or give it a dense gradient.",
                )
        return cls({n: len(p) for n, p in parameters.items()}, {n: p.shape[1] for n, p in parameters.items()})

    @property
    def rows(self) -> int:
        """Of all tables together."""
        return sum(self.sizes.values())

    @property
    def coordinates(self) -> int:
        """V x d of all tables together."""
        return sum(size * self.widths[name] for name, size in self.sizes.items())

    @property
    def offsets(self) -> dict[str, int]:
        """The number of each table's first row."""
        return dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Ascending numbers (k,) of rows to those in each table, counted there."""
        edges = torch.tensor([*self.offsets.values(), self.rows], device=rows.device)
        cuts = torch.searchsorted(rows, edges).tolist()
        starts = self.offsets
        return {
            name: rows[low:high] - starts[name] for name, low, high in zip(self.sizes, cuts, cuts[1:], strict=False)
        }

    def touched(self, factors: Mapping[str, Sequence[Factors]]) -> tuple[Tensor, Tensor]:
        """Which rows each example touches: pairs (example, row), each once, in order.

        A row counts where its gradient is not zero, so padding and masked positions, whose number depends on the
        neighbours in the batch, never do.
        """
        return self.pairs(*self.looked_up(factors))

    def looked_up(self, factors: Mapping[str, Sequence[Factors]]) -> tuple[Tensor, Tensor]:
        """The rows (B, T) that each example looks up, and whether (B, T) their gradients there are not zero."""
        offsets, rows, counted = self.offsets, [], []
        for name in self.sizes:
            for use in factors[name]:
                ids, values = _lookup(name, use)
                rows.append(ids + offsets[name])
                noted = use.touched if isinstance(use, DistinctRows) else None
                counted.append(values.ne(0).any(2) if noted is None else noted)
        if not rows:
            return torch.empty(0, 0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.bool)
        return tuple(torch.cat([part.to(parts[0].device) for part in parts], 1) for parts in (rows, counted))  # type: ignore[return-value]

    def pairs(self, rows: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """What was `looked_up` as pairs (example, row), each once, in order."""
        examples, positions = counted.nonzero(as_tuple=True)
        pairs = (examples * self.rows + rows[examples, positions]).unique()
        return pairs.div(self.rows, rounding_mode="floor"), pairs.remainder(self.rows)


class RowSum:
    """A weighted sum of per-example gradients of one (V, d) table, as the rows that were looked up.

    Args:
        name: of the table.
        table: the parameter.
        notes_touched: whether it is to be known which rows had a gradient in some position.
    """

    def __init__(self, name: str, table: Tensor, notes_touched: bool = False) -> None:
        self._name, self._notes_touched = name, notes_touched
        self._width, self._dtype = table.shape[1], sum_dtype(table.dtype)
        self._ids = [torch.empty(0, dtype=torch.int64, device=table.device)]
        self._values = [torch.empty(0, self._width, dtype=self._dtype, device=table.device)]
        self._is_united, self._waiting = True, 0
        self._touched: list[tuple[Tensor, Tensor]] = []

    @property
    def device(self) -> torch.device:
        return self._values[0].device

    def add_(self, use: Factors, coefficients: Tensor) -> None:
        """Adds sum over i of coefficients[i] x (gradient of example i).

        Raises:
            UnsupportedModelError: the use is no plain lookup of rows.
        """
        ids, values = _lookup(self._name, use)
        if self._notes_touched:
            # The model's own ids, which the next micro-batch may refill in place.
            self._touched.append((ids.flatten().clone(), values.ne(0).any(2).flatten()))
        weighted = values.to(self._dtype) * coefficients.to(self._dtype)[:, None, None]
        self._append(ids.flatten(), weighted.flatten(0, 1))

    def _append(self, ids: Tensor, values: Tensor) -> None:
        if answers_at_once(self.device):
            ids, values = united(ids, values)
            self._is_united = len(self._ids) == 1
        else:
            ids = ids.clone()  # as above
            self._is_united, self._waiting = False, self._waiting + values.numel()
        self._ids.append(ids)
        self._values.append(values)
        if self._waiting > _WAITING:
            self.coalesced()

    def sub_(self, other: RowSum) -> None:
        """Subtracts another sum over the same table."""
        ids, values = other.coalesced()
        self._append(ids, -values)

    def coalesced(self) -> tuple[Tensor, Tensor]:
        """The rows (k,), ascending, and their sums (k, d)."""
        if not self._is_united:
            ids, values = united(torch.cat(self._ids), torch.cat(self._values))
            self._ids, self._values = [self._ids[0], ids], [self._values[0], values]
            self._is_united, self._waiting = True, 0
        return self._ids[-1], self._values[-1]

    def touched(self, rows: Tensor) -> Tensor:
        """(k,) whether any position that was added had a gradient in each of `rows` (k,), whatever their sum is."""
        found = [ids[is_touched] for ids, is_touched in self._touched]
        return torch.isin(rows, torch.cat(found)) if found else torch.zeros_like(rows, dtype=torch.bool)

    def of(self, rows: Tensor) -> Tensor:
        """The sums (k, d) of `rows` (k,); zero where nothing was added."""
        ids, values = self.coalesced()
        out = values.new_zeros(len(rows), self._width)
        if len(ids):
            places = torch.searchsorted(ids, rows).clamp_max(len(ids) - 1)
            known = ids[places] == rows
            out[known] = values[places[known]]
        return out


def restricted(uses: Sequence[Factors], kept: Tensor) -> list[Factors]:
    """The gradients of one table with all rows but those in the mask `kept` (V,) frozen."""
    found: list[Factors] = []
    for use in uses:
        if isinstance(use, Outer) and isinstance(use.left, OneHot) and isinstance(use.right, Dense):
            masked = use.right.values.masked_fill(~kept[use.left.ids].unsqueeze(2), 0)
            found.append(replace(use, right=Dense(masked)))
        else:
            raise _no_lookup("an embedding table")
    return found


def _lookup(name: str, use: Factors) -> tuple[Tensor, Tensor]:
    """The ids (B, T) of a lookup, and the gradients (B, T, d) of what was looked up."""
    if isinstance(use, Outer) and isinstance(use.left, OneHot) and isinstance(use.right, Dense):
        values = use.right.values
        return use.left.ids, values if use.scale == 1.0 else accumulation(values) * use.scale
    raise _no_lookup(name)


def _no_lookup(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} has a sparse private gradient, and is used for more than looking up rows.",
        why="such a use has a gradient in every row, so noise on a few rows would not hide it.",
        fix="untie the output embedding, leave the table out of those that are named, or freeze it.",
    )


def sparse_gradient(rows: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """A (V, d) sparse tensor with `values` (k, d) in the ascending `rows` (k,)."""
    return torch.sparse_coo_tensor(rows[None], values, table.shape, is_coalesced=True, check_invariants=False)


def row_factors(gradient: Tensor) -> DistinctRows:
    """One example's gradient (V, d), sparse or dense, as a lookup of its rows that are not zero."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        ids, values = gradient.indices()[0], gradient.values()
    else:
        ids = gradient.ne(0).any(1).nonzero().squeeze(1)
        values = gradient[ids]
    return DistinctRows(OneHot(ids[None], gradient.shape[0]), Dense(accumulation(values)[None]))


class SparseLookups(TorchFunctionMode):
    """Inside, autograd's gradient of a lookup in one of `tables` is sparse."""

    def __init__(self, tables: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._tables = {id(table) for table in tables}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.embedding and id(args[1] if len(args) > 1 else kwargs.get("weight")) in self._tables:
            args, kwargs = args[:6], {**kwargs, "sparse": True}
        return func(*args, **kwargs)
