"""Is noise Gaussian, of the promised variance, and independent? Tests for every kind, and what rejects wrong noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

# Seeds are fixed, so right noise passes always; a p-value below this says that the noise is not what it should be.
REJECTED = 1e-3
SIZE = 20_000


def variance_p(values: np.ndarray, sd: float) -> float:
    statistic, degrees = float(((values / sd) ** 2).sum()), len(values)
    return float(2 * min(stats.chi2.cdf(statistic, degrees), stats.chi2.sf(statistic, degrees)))


def mean_p(values: np.ndarray, sd: float) -> float:
    return float(2 * stats.norm.sf(abs(values.sum()) / (sd * len(values) ** 0.5)))


def normal_p(values: np.ndarray, sd: float) -> float:
    return float(stats.kstest(values / sd, "norm").pvalue)


def independence_p(left: np.ndarray, right: np.ndarray, sd: float) -> float:
    """The mean product of independent values is Gaussian around zero."""
    return float(2 * stats.norm.sf(abs((left * right).sum()) / (sd**2 * len(left) ** 0.5)))


class DistributionContract:
    """Is the noise Gaussian, of the promised variance, and independent? Every check must also reject wrong noise."""

    def values(self, sd: float, step: int = 0, dtype: torch.dtype = torch.float32, size: int = SIZE) -> np.ndarray:
        """(size,) the noise of one call, under one seed."""
        raise NotImplementedError

    @pytest.mark.parametrize("sd", [1e-6, 0.7, 1.0, 1e4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_noise_has_the_promised_distribution(self, sd: float, dtype: torch.dtype) -> None:
        values = self.values(sd, dtype=dtype)
        for check in (variance_p, mean_p, normal_p):
            assert check(values, sd) > REJECTED, check

    @pytest.mark.parametrize("sd", [1e-6, 1.0, 1e4])
    @pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
    def test_negative_control_a_wrong_sigma_is_rejected(self, sd: float, factor: float) -> None:
        values = self.values(sd * factor)
        assert variance_p(values, sd) < REJECTED
        assert normal_p(values, sd) < REJECTED
        assert mean_p(self.values(sd) + 0.05 * sd, sd) < REJECTED

    def test_steps_are_independent(self) -> None:
        zero, one = self.values(1.0, step=0), self.values(1.0, step=1)
        assert independence_p(zero, one, 1.0) > REJECTED

    def test_negative_control_a_replayed_step_is_rejected(self) -> None:
        assert independence_p(self.values(1.0, step=5), self.values(1.0, step=5), 1.0) < REJECTED
        assert independence_p(self.values(1.0, step=5), -self.values(1.0, step=5), 1.0) < REJECTED

    def test_elements_of_one_tensor_are_independent(self) -> None:
        """Also across the chunks and blocks in which it is filled."""
        values = self.values(1.0, size=(2 << 20) + 77)
        assert variance_p(values, 1.0) > REJECTED
        for lag in (1, 256, 1 << 16, 1 << 20):
            assert independence_p(values[:-lag], values[lag:], 1.0) > REJECTED, lag
