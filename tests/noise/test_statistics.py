"""Is the noise Gaussian, of the promised variance, and independent? Every check must also reject wrong noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dp.noise import gaussian as noise_module
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.randomness import Entropy

# Seeds are fixed, so right noise passes always; a p-value below this says that the noise is not what it should be.
REJECTED = 1e-3
SIZE = 20_000


def by_numpy(sd: float, step: int = 0, dtype: torch.dtype = torch.float32, size: int = SIZE) -> np.ndarray:
    tensor = torch.zeros(size, dtype=dtype)
    GaussianNoise(Entropy(0)).add_([tensor], sd, step)
    return tensor.double().numpy()


def by_torch(sd: float, step: int = 0, dtype: torch.dtype = torch.float32, size: int = SIZE) -> np.ndarray:
    """What runs on a CUDA device, run on the CPU."""
    tensor = torch.zeros(size, dtype=dtype)
    noise_module._add_by_torch(tensor, sd, Entropy(0).fresh("noise", step))
    return tensor.double().numpy()


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


SOURCES = pytest.mark.parametrize("source", [by_numpy, by_torch])
SCALES = pytest.mark.parametrize("sd", [1e-6, 0.7, 1.0, 1e4])


@SOURCES
@SCALES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("check", [variance_p, mean_p, normal_p])
def test_noise_has_the_promised_distribution(source: Callable[..., np.ndarray], sd, dtype, check):
    assert check(source(sd, dtype=dtype), sd) > REJECTED


@SOURCES
@SCALES
@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
@pytest.mark.parametrize("check", [variance_p, normal_p])
def test_negative_control_a_wrong_sigma_is_rejected(source: Callable[..., np.ndarray], sd, factor, check):
    assert check(source(sd * factor), sd) < REJECTED


def test_negative_control_other_distributions_are_rejected():
    generator = np.random.default_rng(0)
    assert normal_p(generator.uniform(-(3**0.5), 3**0.5, SIZE), 1.0) < REJECTED
    assert normal_p(generator.laplace(0, 0.5**0.5, SIZE), 1.0) < REJECTED
    assert mean_p(by_numpy(1.0) + 0.05, 1.0) < REJECTED


@pytest.mark.parametrize("tensors", [1, 4, 16])
def test_failure_9_noise_once_its_variance_does_not_grow_with_the_number_of_tensors(tensors):
    several = [torch.zeros(SIZE // tensors) for _ in range(tensors)]
    GaussianNoise(Entropy(0)).add_(several, 1.0, 0)
    values = torch.cat(several).double().numpy()
    assert variance_p(values, 1.0) > REJECTED
    # Noise from each of two ranks, and noise that was split between ranks that share a seed.
    assert variance_p(values * 2**0.5, 1.0) < REJECTED
    assert variance_p(values / 2**0.5, 1.0) < REJECTED


@SOURCES
def test_steps_are_independent(source: Callable[..., np.ndarray]):
    assert independence_p(source(1.0, step=0), source(1.0, step=1), 1.0) > REJECTED


@SOURCES
def test_negative_control_a_replayed_step_is_rejected(source: Callable[..., np.ndarray]):
    assert independence_p(source(1.0, step=5), source(1.0, step=5), 1.0) < REJECTED
    assert independence_p(source(1.0, step=5), -source(1.0, step=5), 1.0) < REJECTED


def test_tensors_of_one_step_are_independent():
    left, right, transposed = torch.zeros(SIZE), torch.zeros(SIZE), torch.zeros(100, SIZE // 100).t()
    GaussianNoise(Entropy(0)).add_([left, right, transposed], 1.0, 0)
    values = [tensor.flatten().double().numpy() for tensor in (left, right, transposed)]
    assert independence_p(values[0], values[1], 1.0) > REJECTED
    assert independence_p(values[0], values[2], 1.0) > REJECTED
    assert variance_p(values[2], 1.0) > REJECTED


@pytest.mark.parametrize("lag", [1, 256, 1 << 16, 1 << 20])
def test_elements_of_one_tensor_are_independent(lag):
    """Also across the chunks and blocks in which it is filled."""
    values = by_numpy(1.0, size=(2 << 20) + 77)
    assert independence_p(values[:-lag], values[lag:], 1.0) > REJECTED
    assert variance_p(values, 1.0) > REJECTED
