"""Per-example clipping: norms (B,) to coefficients (B,), and the sensitivity that they promise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Room, in units of machine epsilon, for rounding in the coefficient itself and in the weighted sum.
_MARGIN = 8.0


@dataclass(frozen=True)
class Clipping:
    """Scales each example's gradient to l2 norm at most `norm` (Abadi et al. 2016, arXiv:1607.00133, algorithm 1).

    Args:
        norm: the clipping norm C > 0; `math.inf` leaves gradients as they are and promises nothing.
    """

    norm: float

    @property
    def sensitivity(self) -> float:
        """How far one example, added or removed, moves the clipped sum in l2 norm."""
        return self.norm

    def coefficients(self, squared_norms: Tensor, rounding: Tensor) -> Tensor:
        """min(1, C / norm) for each example, and exactly 0 where the norm is not finite.

        Args:
            squared_norms: (B,) squared l2 norms.
            rounding: (B,) a bound on their floating-point error; the norm is taken as large as it can be.

        Returns:
            (B,) in the dtype of `squared_norms`.
        """
        finite = (squared_norms + rounding).isfinite()
        if math.isinf(self.norm):
            return finite.to(squared_norms.dtype)
        bound = self.norm * (1 - _MARGIN * torch.finfo(squared_norms.dtype).eps)
        norms = (squared_norms.double() + rounding.double()).sqrt()
        return (bound / norms).clamp(max=1.0).where(finite, 0.0).to(squared_norms.dtype)
