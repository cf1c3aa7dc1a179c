"""Automatic clipping: every gradient, long or short, is brought near norm C."""

from __future__ import annotations

from torch import Tensor

from hf_dp.accounting import AutomaticClipping
from hf_dp.clipping.rule import ClippingRule


class Automatic(ClippingRule):
    """Scales each example's gradient g by C / (|g| + gamma) (Bu et al. 2022, arXiv:2206.07136, AUTO-S).

    Sensitivity: the scaled norm is C |g| / (|g| + gamma), and |g| < |g| + gamma for gamma > 0; so it is below C for
    every finite g, and 0 for g = 0. One example, replaced by nothing, moves the sum by less than C. The bound is as
    tight as that of flat clipping: for |g| >> gamma the norm is C.
    """

    terms: AutomaticClipping

    def scales(self, norms: Tensor, bound: float) -> Tensor:
        """C / (norm + gamma)."""
        return bound / (norms + self.terms.gamma)
