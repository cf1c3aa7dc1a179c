"""Flat clipping: long gradients are cut to norm C, short ones are left as they are."""

from __future__ import annotations

from torch import Tensor

from hf_dp.clipping.rule import ClippingRule


class Flat(ClippingRule):
    """Scales each example's gradient to l2 norm at most C (Abadi et al. 2016, arXiv:1607.00133, algorithm 1).

    An infinite C leaves gradients as they are and promises nothing.
    """

    def scales(self, norms: Tensor, bound: float) -> Tensor:
        """min(1, C / norm)."""
        return (bound / norms).clamp(max=1.0)
