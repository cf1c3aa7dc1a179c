"""How many examples of a logical batch touch each row of the tables."""

from __future__ import annotations

import torch
from torch import Tensor

import hf_dp.ranks as ranks
from hf_dp.per_example import PerExampleGradients, Tables


class ContributionSum:
    """How many examples touch each row of the tables; each example's 0/1 vector is clipped to l2 norm `norm`.

    DP-AdaFEST's contribution map (Ghazi et al. 2023, arXiv:2311.08357, algorithm 1) before its noise. On several ranks
    each adds its own examples.

    Args:
        tables: whose rows are counted, all together.
        norm: the clipping norm C1, which is the sensitivity of the counts under adding or removing one example.
    """

    def __init__(self, tables: Tables, norm: float) -> None:
        self._tables, self._norm = tables, norm
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._rows = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.float64)

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one example moves the counts in l2 norm."""
        return self._norm

    def add(self, gradients: PerExampleGradients, used: Tensor) -> None:
        """Counts the examples of one micro-batch that are `used` (B,): what adds no gradient adds no count."""
        # Which these are is asked of the device when all are in.
        self._waiting.append((*self._tables.looked_up(gradients.factors), used))

    def _count(self, looked_up: Tensor, counted: Tensor, used: Tensor) -> None:
        examples, rows = self._tables.pairs(looked_up, counted)
        touched = examples.bincount(minlength=len(used))
        weights = (self._norm / touched.clamp_min(1).double().sqrt()).clamp_max(1.0).where(used, 0.0)
        kept = used[examples]
        self._append(rows[kept].cpu(), weights[examples[kept]].cpu())

    def _append(self, rows: Tensor, weights: Tensor) -> None:
        found, inverse = torch.cat([self._rows, rows]).unique(return_inverse=True)
        weights = torch.cat([self._counts, weights])
        self._rows, self._counts = found, weights.new_zeros(len(found)).index_add_(0, inverse, weights)

    def touched(self) -> tuple[Tensor, Tensor]:
        """The rows (k,) that any example of any rank touches, ascending, and their counts (k,), float64.

        On several ranks all call it together: one all-reduce of one number for each row of the tables.
        """
        for one in self._waiting:
            self._count(*one)
        self._waiting = []
        if ranks.world_size() == 1:
            return self._rows, self._counts
        counts = torch.zeros(self._tables.rows, dtype=torch.float64)
        counts[self._rows] = self._counts
        ranks.sum_(counts)
        # Every example adds more than zero to a row that it touches.
        rows = counts.nonzero().squeeze(1)
        return rows, counts[rows]
