"""Several rows of one person in a truncated Poisson sample with Gaussian noise: what one use of it costs.

All k rows of a person add nothing in D', and are drawn as in D; so which rows a step uses is distributed alike. Let K
be how many of the n - k others are drawn. Whoever is told K, or more of the sample, learns no less (joint convexity).

- Given that K <= B - k nobody is left out, whatever is drawn of the person: k rows in a Poisson sample (`Group`).
- Given that K > B - k all is told of the sample. Of the person j rows are used, at most as many as are drawn, which are
  binomial whatever K is; the sum moves by at most j. The divergence of two Gaussians rises with their distance.

It is an upper bound, and close where K > B - k is rare. Several queries of one sample are one Gaussian here too: given
the sample they compose to it exactly, and otherwise as in `group`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import dp_accounting as dp
import numpy as np
from scipy import stats

from hf_dp.accounting.composition import StepLoss, mixed
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.accounting.group import ByDistributions, Group, chances_of


@dataclass(frozen=True, order=True)
class TruncatedGroup(ByDistributions):
    """A sum with Gaussian noise over a truncated Poisson sample, seen by a person with several rows; see `Primitive`.

    It is no event of a training, only what one of `Truncated` is to such a person.

    Attributes:
        number: n, how many rows there are.
        most: how many of those that are drawn are kept, at least 1.
        group: the same without truncation.
    """

    number: int
    most: int
    group: Group

    @property
    def event(self) -> dp.DpEvent:
        raise NotImplementedError("dp_accounting has no event for it")

    @property
    def is_finite(self) -> bool:
        return self.group.is_finite

    def of_group(self, rows: int) -> TruncatedGroup | None:
        return self if rows == 1 else None

    @property
    def full(self) -> float:
        """The probability that more than B - k of the others are drawn, of each step."""
        others = max(self.number - self.group.rows, 0)
        return float(stats.binom.sf(self.most - self.group.rows, others, self.group.probability))

    def losses(self, cell: float) -> tuple[StepLoss, StepLoss]:
        return _losses(self, cell)

    def scale(self) -> tuple[float, float]:
        (deviation, width), noise, k = self.group.scale(), self.group.noise, self.group.rows
        drawn, weights = np.arange(k + 1), np.array(chances_of(k, self.group.probability))
        means = (drawn / noise) ** 2 / 2
        told = float(weights @ (2 * means)) + float(weights @ (means - weights @ means) ** 2)
        # Of the widest Gaussian, as far as `dp_accounting` keeps its tails.
        widest = 20 * k / noise
        return math.sqrt((1 - self.full) * deviation**2 + self.full * told), max(width, widest)


@functools.lru_cache(maxsize=8)
def _losses(one: TruncatedGroup, cell: float) -> tuple[StepLoss, StepLoss]:
    group, full = one.group, one.full
    told = [(full * chance, j) for j, chance in enumerate(chances_of(group.rows, group.probability)) if j]
    nothing = StepLoss(0, np.ones(1), 0.0), full * chances_of(group.rows, group.probability)[0]
    found = []
    for adjacency in range(2):
        parts = [(1 - full, group.losses(cell)[adjacency]), (nothing[1], nothing[0])]
        parts += [(chance, Gaussian(1.0, group.noise / j).losses(cell)[adjacency]) for chance, j in told if chance > 0]
        found.append(mixed(parts))
    return found[0], found[1]
