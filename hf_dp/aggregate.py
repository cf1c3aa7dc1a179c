"""The clipped sum of one logical batch over its micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dp.clipping import Clipping
from hf_dp.per_example import RowSum, Tables
from hf_dp.per_example.precision import sum_dtype
from hf_dp.per_example.record import PerExampleGradients


class ClippedSum:
    """A sum over examples of clipped gradients, and the sensitivity that it is known to have.

    Attributes:
        gradients: the sum for each trainable parameter but tables, float32 (float64 for float64 parameters).
        rows: the sum for each embedding table whose gradient is sparse.
        contributions: how many examples touch each row of the tables; None if they are not counted.
        examples: how many examples were added.
        clipped: how many of them were scaled down.
        non_finite: how many had a gradient that is not finite, and so contributed nothing.
        loss: the sum of the finite examples' losses.
    """

    def __init__(
        self,
        model: nn.Module,
        clipping: Clipping,
        tables: Tables | None = None,
        contributions: ContributionSum | None = None,
    ) -> None:
        self._clipping = clipping
        names = () if tables is None else tables.sizes
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients: dict[str, Tensor] = {
            name: torch.zeros_like(p, dtype=sum_dtype(p.dtype), requires_grad=False)
            for name, p in trained.items()
            if name not in names
        }
        self.rows = {name: RowSum(name, trained[name]) for name in names}
        self.contributions = contributions
        self.examples = self.clipped = self.non_finite = 0
        self.loss = 0.0

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one example moves the gradients in l2 norm, over all parameters together."""
        return self._clipping.sensitivity

    def add(self, gradients: PerExampleGradients) -> None:
        """Clips and adds the examples of one micro-batch."""
        coefficients = self._clipping.coefficients(gradients.squared_norms(), gradients.rounding())
        # A finite gradient of an infinite loss is no gradient of anything.
        coefficients = coefficients.where(gradients.losses.isfinite(), 0.0)
        gradients.add_weighted_sum_(self.gradients, coefficients, self.rows)
        used = coefficients.ne(0)
        if self.contributions is not None:
            self.contributions.add(gradients, used)
        self.examples += gradients.batch_size
        self.non_finite += int((~used).sum())
        self.clipped += int((used & coefficients.lt(1)).sum())
        self.loss += float(gradients.losses.double().where(used, 0.0).sum())


class ContributionSum:
    """How many examples touch each row of the tables; each example's 0/1 vector is clipped to l2 norm `norm`.

    DP-AdaFEST's contribution map (Ghazi et al. 2023, arXiv:2311.08357, algorithm 1) before its noise.

    Args:
        tables: whose rows are counted, all together.
        norm: the clipping norm C1, which is the sensitivity of the counts under adding or removing one example.
    """

    def __init__(self, tables: Tables, norm: float) -> None:
        self._tables, self._norm = tables, norm
        self._rows = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(0, dtype=torch.float64)

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one example moves the counts in l2 norm."""
        return self._norm

    def add(self, gradients: PerExampleGradients, used: Tensor) -> None:
        """Counts the examples of one micro-batch that are `used` (B,): what adds no gradient adds no count."""
        examples, rows = self._tables.touched(gradients.factors)
        touched = examples.bincount(minlength=gradients.batch_size)
        weights = (self._norm / touched.clamp_min(1).double().sqrt()).clamp_max(1.0).where(used, 0.0)
        kept = used[examples]
        self._append(rows[kept].cpu(), weights[examples[kept]].cpu())

    def _append(self, rows: Tensor, weights: Tensor) -> None:
        found, inverse = torch.cat([self._rows, rows]).unique(return_inverse=True)
        weights = torch.cat([self._counts, weights])
        self._rows, self._counts = found, weights.new_zeros(len(found)).index_add_(0, inverse, weights)

    def touched(self) -> tuple[Tensor, Tensor]:
        """The rows (k,) that any example touches, ascending, and their counts (k,), float64."""
        return self._rows, self._counts.clone()
