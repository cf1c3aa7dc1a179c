"""Clipping: coefficients in every corner of the floating-point range."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dp.clipping.flat import Clipping


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_gradients_are_scaled_to_the_norm_and_short_ones_left(dtype: torch.dtype) -> None:
    norms = torch.tensor([0.0, 0.5, 1.0, 2.0, 1e6], dtype=dtype)
    found = Clipping(1.0).coefficients(norms.square(), torch.zeros(5, dtype=dtype))
    assert found.dtype == dtype
    assert found[:2].eq(1).all()
    assert bool((found * norms <= 1).all())
    assert torch.allclose(found[3:], 1 / norms[3:], rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1e-6, 0.1, 1.0, 3.0, 1e6])
def test_the_bound_holds_in_floating_point(dtype: torch.dtype, norm: float) -> None:
    generator = torch.Generator().manual_seed(0)
    squared = (10 ** (torch.rand(10_000, generator=generator, dtype=torch.float64) * 24 - 12)).to(dtype)
    found = Clipping(norm).coefficients(squared, torch.zeros_like(squared))
    assert float((found.double() * squared.double().sqrt()).max()) <= norm


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm", [1.0, math.inf])
def test_failure_14_what_is_not_finite_gets_zero_by_selection(bad: float, norm: float) -> None:
    squared, zero = torch.tensor([1.0, bad, 4.0]), torch.zeros(3)
    for found in (
        Clipping(norm).coefficients(squared, zero),
        Clipping(norm).coefficients(squared.nan_to_num(), squared),
    ):
        assert found[1] == 0
        assert found.isfinite().all()
        assert found[0] > 0
        assert found[2] > 0


def test_rounding_makes_the_norm_larger_never_smaller() -> None:
    squared = torch.tensor([0.9, 4.0])
    plain = Clipping(1.0).coefficients(squared, torch.zeros(2))
    careful = Clipping(1.0).coefficients(squared, torch.tensor([0.5, 0.5]))
    assert bool((careful < plain).all())
    assert float(careful[0]) <= 1.4**-0.5


def test_infinite_norm_leaves_gradients_alone_and_promises_nothing() -> None:
    clipping = Clipping(math.inf)
    assert clipping.coefficients(torch.tensor([0.0, 1e30]), torch.zeros(2)).eq(1).all()
    assert clipping.sensitivity == math.inf
    assert Clipping(2.5).sensitivity == 2.5
