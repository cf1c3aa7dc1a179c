"""The Gaussian mechanism, Poisson-sampled or not: what one use of it costs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting import pld as dp_pld
from dp_accounting.pld import privacy_loss_mechanism

from hf_dp.accounting.composition import StepLoss, as_step_loss
from hf_dp.accounting.group import MIN_NOISE, Group
from hf_dp.config.ranges import is_noise, is_number


@dataclass(frozen=True, order=True)
class Gaussian:
    """A sum with Gaussian noise over a Poisson sample (Abadi et al. 2016, arXiv:1607.00133); see `Primitive`.

    Attributes:
        probability: with which each unit is sampled, in [0, 1].
        noise: standard deviation, in units of the sensitivity.
    """

    probability: float
    noise: float

    @classmethod
    def of(cls, event: dp.DpEvent) -> Gaussian | None:
        """Of a Gaussian event, or one that is Poisson-sampled; None if it is neither, or its numbers are none."""
        match event:
            case dp.GaussianDpEvent(noise_multiplier=noise) if is_noise(noise):
                return cls(1.0, float(noise))
            case dp.PoissonSampledDpEvent(sampling_probability=q, event=dp.GaussianDpEvent(noise_multiplier=noise)) if (
                is_noise(noise) and is_number(q) and 0 <= q <= 1
            ):
                return cls(float(q), float(noise))
        return None

    @staticmethod
    def merged(counts: Mapping[Any, int]) -> dict[Any, int]:
        """Gaussians on the whole dataset compose exactly into one: their precisions add."""
        precision = math.fsum(n / one.noise / one.noise for one, n in counts.items() if one.probability == 1)
        merged = {one: n for one, n in counts.items() if one.probability < 1}
        if precision > 0:
            merged[Gaussian(1.0, precision**-0.5)] = 1
        return merged

    @property
    def event(self) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(self.probability, dp.GaussianDpEvent(self.noise))

    @property
    def is_free(self) -> bool:
        return self.probability == 0

    @property
    def is_finite(self) -> bool:
        return MIN_NOISE <= self.noise < math.inf

    @property
    def is_a_sum(self) -> bool:
        return self.probability < 1

    @property
    def has_renyi(self) -> bool:
        return True

    @property
    def advantage(self) -> float:
        # Of the closest two normal distributions that the noise makes, where the unit is drawn.
        return self.probability * math.erf(1 / (math.sqrt(8) * self.noise))

    def of_group(self, rows: int) -> Gaussian | Group:
        # What is 1 / noise-Gaussian for one row is rows / noise-Gaussian for several (Dong, Roth and Su 2019,
        # arXiv:1905.02383, theorem 2.14), whatever mechanism it stands for.
        return Gaussian(1.0, self.noise / rows) if self.probability == 1 else Group(self.probability, self.noise, rows)

    def losses(self, cell: float) -> tuple[StepLoss, StepLoss]:
        return _losses(self.probability, self.noise, cell)

    def scale(self) -> tuple[float, float]:
        q, noise = self.probability, self.noise
        z = np.linspace(-10, 10, 4001)
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])

        def loss(x: np.ndarray) -> np.ndarray:
            exponent = (x - 0.5 / noise) / noise
            if q == 1:
                return exponent
            small = np.log1p(q * np.expm1(np.minimum(exponent, 30)))
            return np.where(exponent > 30, np.log(q) + exponent, small)

        without, with_it = loss(z), loss(z + 1 / noise)
        removed = _variance(np.concatenate([without, with_it]), np.concatenate([density * (1 - q), density * q]))
        added = _variance(without, density)
        kinds = privacy_loss_mechanism.AdjacencyType
        widths = []
        for kind in (kinds.REMOVE, kinds.ADD) if q < 1 else (kinds.REMOVE,):
            bounds = privacy_loss_mechanism.GaussianPrivacyLoss(
                noise, sampling_prob=q, adjacency_type=kind
            ).connect_dots_bounds()
            widths.append(bounds.epsilon_upper - bounds.epsilon_lower)
        return math.sqrt(max(removed, added)), max(widths)


@functools.lru_cache(maxsize=8)
def _losses(q: float, noise: float, cell: float) -> tuple[StepLoss, StepLoss]:
    pld = dp_pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise, value_discretization_interval=cell, sampling_prob=q
    )
    # Not public; a test holds what is made of them against exact integrals.
    remove, add = (pmf.to_dense_pmf() for pmf in (pld._pmf_remove, pld._pmf_add))
    return as_step_loss(remove), as_step_loss(add)


def _variance(values: np.ndarray, weights: np.ndarray) -> float:
    mean = float(values @ weights)
    return float(((values - mean) ** 2) @ weights)
