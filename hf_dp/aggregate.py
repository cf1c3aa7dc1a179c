"""The clipped sum of one logical batch over its micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dp.clipping import Clipping
from hf_dp.per_example.precision import sum_dtype
from hf_dp.per_example.record import PerExampleGradients


class ClippedSum:
    """A sum over examples of clipped gradients, and the sensitivity that it is known to have.

    Attributes:
        gradients: the sum for each trainable parameter, float32 (float64 for float64 parameters).
        examples: how many examples were added.
        clipped: how many of them were scaled down.
        non_finite: how many had a gradient that is not finite, and so contributed nothing.
        loss: the sum of the finite examples' losses.
    """

    def __init__(self, model: nn.Module, clipping: Clipping) -> None:
        self._clipping = clipping
        self.gradients: dict[str, Tensor] = {
            name: torch.zeros_like(p, dtype=sum_dtype(p.dtype), requires_grad=False)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self.examples = self.clipped = self.non_finite = 0
        self.loss = 0.0

    @property
    def sensitivity(self) -> float:
        """How far adding or removing one example moves `gradients` in l2 norm, over all parameters together."""
        return self._clipping.sensitivity

    def add(self, gradients: PerExampleGradients) -> None:
        """Clips and adds the examples of one micro-batch."""
        coefficients = self._clipping.coefficients(gradients.squared_norms(), gradients.rounding())
        # A finite gradient of an infinite loss is no gradient of anything.
        coefficients = coefficients.where(gradients.losses.isfinite(), 0.0)
        gradients.add_weighted_sum_(self.gradients, coefficients)
        used = coefficients.ne(0)
        self.examples += gradients.batch_size
        self.non_finite += int((~used).sum())
        self.clipped += int((used & coefficients.lt(1)).sum())
        self.loss += float(gradients.losses.double().where(used, 0.0).sum())
