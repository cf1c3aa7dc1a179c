"""Flat clipping: long gradients are cut to norm C, short ones are left."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from hf_dp.accounting import FlatClipping
from hf_dp.clipping.flat import Flat
from hf_dp.clipping.rule import ClippingRule
from tests.clipping.contract import ClippingRuleContract, plan_of, promise


class TestFlat(ClippingRuleContract):
    kind: ClassVar[Any] = "flat"
    written: ClassVar[dict[str, Any]] = {"norm": 0.5, "kind": "flat"}


def flat(norm: float) -> ClippingRule:
    return Flat(FlatClipping(norm=norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_gradients_are_scaled_to_the_norm_and_short_ones_left(dtype: torch.dtype) -> None:
    norms = torch.tensor([0.0, 0.5, 1.0, 2.0, 1e6], dtype=dtype)
    found = flat(1.0).coefficients(norms.square(), torch.zeros(5, dtype=dtype))
    assert found.dtype == dtype
    assert found[:2].eq(1).all()
    assert bool((found * norms <= 1).all())
    assert torch.allclose(found[3:], 1 / norms[3:], rtol=1e-5)


def test_rounding_makes_the_norm_larger_never_smaller() -> None:
    squared = torch.tensor([0.9, 4.0])
    plain = flat(1.0).coefficients(squared, torch.zeros(2))
    careful = flat(1.0).coefficients(squared, torch.tensor([0.5, 0.5]))
    assert bool((careful < plain).all())
    assert float(careful[0]) <= 1.4**-0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_infinite_norm_leaves_gradients_alone_and_promises_nothing(bad: float) -> None:
    clipping = flat(math.inf)
    assert clipping.coefficients(torch.tensor([0.0, 1e30, bad]), torch.zeros(3)).tolist() == [1, 1, 0]
    assert clipping.sensitivity == math.inf


def test_ledgers_and_reports_of_flat_runs_do_not_name_the_rule() -> None:
    """As those of before there was another one."""
    plan = plan_of(promise())
    assert "clipping" not in plan.promise
    assert plan.promise["clipping_norm"] == 0.5
