"""Several rows of one person, or of one unit, in a Poisson sample with Gaussian noise: what one use of it costs.

Each of k rows is drawn with probability q by itself, and each adds at most the sensitivity. If j of them are drawn, the
sum moves by at most j times that, with the probability of j among k draws: a mixture of Gaussians at 0, 1, ..., k
against the one at 0. That pair dominates all others, also of vectors that point anywhere and of queries that are chosen
with a look at the answers before (Ganesh 2024, arXiv:2401.10294; Choquette-Choo et al. 2023, arXiv:2310.15526,
corollary 4.7), under zero-out as under add-or-remove. Fewer rows than k are drawn no more often, and cost no more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld import privacy_loss_mechanism

from hf_dp.accounting.composition import StepLoss, as_step_loss
from hf_dp.config.ranges import is_noise, is_number
from hf_dp.config.units import MOST_ROWS

# Squares of smaller numbers vanish. Their epsilon is beyond 1e100: as good as infinite.
MIN_NOISE = 1e-60
# What dp_accounting finds thresholds for.
_MIN_NOISE = 1e-9
_BOTH = (privacy_loss_mechanism.AdjacencyType.REMOVE, privacy_loss_mechanism.AdjacencyType.ADD)
# Halvings of an interval of some 100 standard deviations: thresholds are exact to 1e-8 of one, and what is computed
# from them to the square of that.
_HALVINGS = 34
# Relative, of chances that were computed from a probability that is computed from them.
_ROUNDING, _NOTHING = 1e-9, 1e-300
# dp_accounting does not name it at its top.
EVENT = dp.dp_event.MixtureOfGaussiansDpEvent
# A person with several units. Time grows with the rows: beyond it is seconds, at each save.
MOST_OF_PERSON = 64


class ByDistributions:
    """What is alike of mechanisms whose cost is known by privacy loss distributions alone; see `Primitive`."""

    has_renyi = False
    is_a_sum = True
    advantage = 0.0

    @property
    def is_free(self) -> bool:
        return False

    @staticmethod
    def merged(counts: Mapping[Any, int]) -> dict[Any, int]:
        return dict(counts)


@dataclass(frozen=True, order=True)
class Group(ByDistributions):
    """A sum with Gaussian noise over a Poisson sample, seen by a person with several rows; see `Primitive`.

    Attributes:
        probability: with which each row is sampled, in (0, 1).
        noise: standard deviation, in units of the sensitivity to one row.
        rows: how many are the person's, at least 1.
    """

    probability: float
    noise: float
    rows: int

    @classmethod
    def of(cls, event: Any) -> Group | None:
        """Of a `MixtureOfGaussiansDpEvent` that `event` makes; None of another."""
        noise, drawn, chances = event.standard_deviation, event.sensitivities, event.sampling_probs
        rows = len(drawn) - 1
        if not (is_noise(noise) and 1 <= rows <= MOST_ROWS and len(chances) == rows + 1):
            return None
        possible = all(is_number(chance) and 0 <= chance <= 1 for chance in chances)
        if list(drawn) != [float(j) for j in range(rows + 1)] or not possible:
            return None
        likeliest = max(range(rows), key=lambda j: min(chances[j], chances[j + 1]))
        # Exact up to q: near 1, what is left of it decides about the chances of few draws.
        few = Fraction(chances[likeliest]) * (rows - likeliest)
        more = Fraction(chances[likeliest + 1]) * (likeliest + 1)
        q = float(more / (few + more)) if min(few, more) > 0 else 0.0
        if not 0 < q < 1:
            return None
        alike = zip(chances, chances_of(rows, q), strict=True)
        same = all(math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=_NOTHING) for one, other in alike)
        return cls(q, float(noise), rows) if same else None

    @property
    def event(self) -> dp.DpEvent:
        return EVENT(self.noise, *self._mixture)

    @property
    def is_finite(self) -> bool:
        return max(MIN_NOISE, _MIN_NOISE) * self.rows <= self.noise < math.inf

    def of_group(self, rows: int) -> Group | None:
        most = self.rows * rows
        return Group(self.probability, self.noise, most) if rows == 1 or most <= MOST_OF_PERSON else None

    @property
    def _mixture(self) -> tuple[list[float], list[float]]:
        return [float(j) for j in range(self.rows + 1)], list(chances_of(self.rows, self.probability))

    def losses(self, cell: float) -> tuple[StepLoss, StepLoss]:
        return _losses(self, cell)

    def scale(self) -> tuple[float, float]:
        widths, deviations = [], []
        for loss in _both(self):
            bounds = loss.connect_dots_bounds()
            widths.append(bounds.epsilon_upper - bounds.epsilon_lower)
            deviations.append(loss.deviation())
        return max(deviations), max(widths)


@functools.lru_cache(maxsize=64)
def chances_of(rows: int, probability: float) -> tuple[float, ...]:
    """Of j in 0 to `rows` draws, each with `probability`: rounded once, so that records say the same everywhere."""
    q = Fraction(probability)
    return tuple(float(math.comb(rows, j) * q**j * (1 - q) ** (rows - j)) for j in range(rows + 1))


class _Loss(privacy_loss_mechanism.MixtureGaussianPrivacyLoss):  # type: ignore[misc]
    """That of `dp_accounting`, with all thresholds found at once: ten times as fast."""

    def inverse_privacy_losses(self, privacy_losses: np.ndarray, precision: float = 0.0) -> np.ndarray:
        far = 40 * self._standard_deviation + self._max_sens
        below, above = np.full(len(privacy_losses), -far), np.full(len(privacy_losses), far)
        for _ in range(_HALVINGS):
            middle = (below + above) / 2
            too_large = self.at(middle) > privacy_losses
            below, above = np.where(too_large, middle, below), np.where(too_large, above, middle)
        return above

    def at(self, x: np.ndarray) -> np.ndarray:
        """The privacy loss at each x."""
        sign = -1 if self.adjacency_type == _BOTH[0] else 1
        exponents = (sign * np.multiply.outer(x, self.sensitivities) - self.sensitivities**2 / 2) / self._variance
        exponents += self._log_sampling_probs
        top = exponents.max(axis=1)
        loss: np.ndarray = top + np.log(np.exp(exponents - top[:, None]).sum(axis=1))
        return -sign * loss

    def deviation(self) -> float:
        """Of the privacy loss, its standard deviation."""
        z = np.linspace(-10, 10, 2001)
        density = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
        if self.adjacency_type == _BOTH[1]:
            x, weights = z * self._standard_deviation, density
        else:
            x = np.subtract.outer(z * self._standard_deviation, self.sensitivities).ravel()
            weights = np.multiply.outer(density, self.sampling_probs).ravel()
        losses = self.at(x)
        mean = float(losses @ weights)
        return math.sqrt(float((losses - mean) ** 2 @ weights))


def _both(group: Group) -> list[_Loss]:
    return [_Loss(group.noise, *group._mixture, adjacency_type=kind) for kind in _BOTH]


@functools.lru_cache(maxsize=16)
def _losses(group: Group, cell: float) -> tuple[StepLoss, StepLoss]:
    # Not public; a test holds what is made of it against exact integrals.
    remove, add = (
        distributions._create_pld_pmf_from_monotone_privacy_loss(
            loss, pessimistic_estimate=True, value_discretization_interval=cell, use_connect_dots=True
        )
        for loss in _both(group)
    )
    return as_step_loss(remove.to_dense_pmf()), as_step_loss(add.to_dense_pmf())
