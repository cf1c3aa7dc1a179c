"""Examples whose rows lie in several micro-batches: their gradients are added up until they are whole.

An example is clipped by the norm of the very sum that it adds, so that ties, adapters and whatever else its rows go
through need no thought: gradients of parameters are added. That sum takes as much memory as the trained parameters in
float32, on each rank that has such an example.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from hf_dp.errors import HfDpError
from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.rows import RowSum, row_factors, sparse_gradient
from hf_dp.per_example.rule import most_differing


class Pieces:
    """Joins the examples of one pass over micro-batches, in their order.

    Args:
        tables: the names of parameters whose gradients are kept as rows.
    """

    def __init__(self, tables: Collection[str] = ()) -> None:
        self._tables = tables
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, RowSum] = {}
        self._magnitudes: dict[str, Tensor] = {}
        self._losses: list[Tensor] = []
        self._differing: list[Tensor] = []
        self._seen = self._size = 0

    def joined(self, gradients: PerExampleGradients) -> PerExampleGradients:
        """`gradients` of whole examples as they are; of rows of one example those of no example, but with its last rows
        its own.

        Raises:
            HfDpError: they are not the rows that come next.
        """
        before, after = gradients.elsewhere
        size = before + gradients.batch_size + after if before or after else 0
        if before != self._seen or (before and size != self._size):
            raise _torn(f"rows of one after {before} others of it", self._seen)
        if not size:
            return gradients
        if not before:
            self._begin(gradients)
        gradients.add_weighted_sum_(self._sums, torch.ones_like(gradients.losses), self._rows)
        for name, found in gradients.magnitudes().items():
            self._magnitudes[name] = found.sum() + self._magnitudes.get(name, 0)
        self._losses.append(gradients.losses)
        self._differing += [] if gradients.differing is None else [gradients.differing]
        self._seen, self._size = size - after, size
        return gradients.none() if after else self._end(gradients)

    def refuse_rest(self) -> None:
        """Refuses an example whose last rows did not come (`HfDpError`)."""
        if self._seen:
            raise _torn("no further rows", self._seen)

    def _begin(self, gradients: PerExampleGradients) -> None:
        parameters = gradients.parameters
        self._rows = {name: RowSum(name, parameters[name], notes_touched=True) for name in self._tables}
        self._sums = {name: gradients.whole_zeros(name) for name in parameters if name not in self._rows}

    def _end(self, gradients: PerExampleGradients) -> PerExampleGradients:
        lengths = {name: Lengths(found.view(1, 1)) for name, found in self._magnitudes.items()}
        factors: dict[str, list[Factors]] = {
            name: [PerExample(total[None], lengths=lengths.get(name))] for name, total in self._sums.items()
        }
        for name, rows in self._rows.items():
            ids, values = rows.coalesced()
            found = row_factors(sparse_gradient(ids, values, gradients.parameters[name]))
            # Rows that cancel count as they do of an example that is whole in one micro-batch.
            factors[name] = [replace(found, given=lengths.get(name), touched=rows.touched(ids)[None])]
        losses = torch.cat(self._losses).sum(0, keepdim=True)
        whole = PerExampleGradients(losses, factors, gradients.parameters, gradients.uses)
        whole.differing = most_differing(self._differing)
        self._sums, self._rows, self._magnitudes, self._losses, self._seen = {}, {}, {}, [], 0
        self._differing = []
        return whole


def _torn(found: str, seen: int) -> HfDpError:
    return HfDpError(
        f"{found}, where {seen} rows of an example have come that has more.",
        why="an example's gradient is clipped when it is whole.",
        fix="hand on the micro-batches of the loader as they are, all of them, in their order.",
    )
