"""What a clipping rule is: terms, the sensitivity that they promise, and a coefficient for each norm that keeps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dp.accounting import ClippingTerms

# Room, in units of machine epsilon, for rounding in the coefficient itself, in the weighted sum, and in the norm of
# what is summed, which is made of 512 numbers at a time: up to 18 each time, of a million numbers three times.
_MARGIN = 64.0


class Group(NamedTuple):
    """Parameters that are clipped together.

    Attributes:
        names: of these, as `trainable` has them.
        share: what they have of the sensitivity; the squares of all groups' shares add up to 1.
    """

    names: frozenset[str]
    share: float


class ClippingRule(ABC):
    """Scales each example's gradient to a bounded l2 norm.

    A rule says one thing, `scales`. What privacy rests on besides is here, once for all rules: rounding is counted
    against the bound, and what is not finite adds nothing.

    Args:
        terms: what the mechanism says of clipping.
    """

    def __init__(self, terms: ClippingTerms) -> None:
        self.terms = terms

    @property
    def sensitivity(self) -> float:
        """How far one example, added or removed, moves the clipped sum in l2 norm."""
        return self.terms.sensitivity

    def groups(self, names: Mapping[str, Collection[str]]) -> tuple[Group, ...]:
        """Which parameters are clipped together: all of them, unless a rule says otherwise.

        Args:
            names: of each trained parameter by its first, all that it has where it is tied.
        """
        return (Group(frozenset(names), 1.0),)

    def coefficients(self, squared_norms: Tensor, rounding: Tensor, share: float = 1.0) -> Tensor:
        """What each example's gradient is multiplied by: exactly 0 where its norm is not finite.

        Args:
            squared_norms: (B,) squared l2 norms.
            rounding: (B,) a bound on their floating-point error; the norm is taken as large as it can be.
            share: of the sensitivity, where the norms are those of one group.

        Returns:
            (B,) in the dtype of `squared_norms`. Each times its norm is at most `share` x `sensitivity`, in floating
            point too.
        """
        bound = share * self.sensitivity * (1 - _MARGIN * torch.finfo(squared_norms.dtype).eps)
        norms = (squared_norms.double() + rounding.double()).sqrt()
        finite = (squared_norms + rounding).isfinite()
        # A scalar for `where` would be moved to the device first, and be waited for.
        return self.scales(norms, bound).masked_fill(~finite, 0.0).to(squared_norms.dtype)

    @abstractmethod
    def scales(self, norms: Tensor, bound: float) -> Tensor:
        """(B,) float64: numbers from 0, each at most `bound` / norm, so that no scaled norm exceeds `bound`.

        Args:
            norms: (B,) l2 norms, float64; the answer to one that is not finite is not used.
            bound: on every scaled norm; infinite where nothing is promised.
        """
