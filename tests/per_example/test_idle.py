"""Positions without a gradient are left out of factors, and norms and sums stay what they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.per_example import idle as idle_module
from hf_dp.per_example import loop, record
from hf_dp.per_example.factors import Outer
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.idle import without_idle
from hf_dp.per_example.norms import squared_norms
from tests.per_example.small import Small, batch, relative_error, square

B, T, P, D = 3, 8, 4, 5
USED = [1, 6]


def some(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    left, right = torch.zeros(B, T, P, dtype=dtype), torch.randn(B, T, D, dtype=dtype)
    left[:, USED] = torch.randn(B, len(USED), P, dtype=dtype)
    return left, right


@pytest.mark.parametrize("is_right", [False, True])
def test_the_gradients_are_those_of_the_used_positions(is_right: bool) -> None:
    left, right = some()
    outer = Outer(Dense(left), Dense(right), 2.0)
    found = without_idle(outer.transposed if is_right else outer)
    found = found.transposed if is_right else found
    assert torch.equal(found.left.tensor, left[:, USED])
    assert torch.equal(found.right.tensor, right[:, USED])
    assert torch.allclose(squared_norms([found])[0], squared_norms([outer])[0], rtol=1e-12)
    sums = [torch.zeros(P, D, dtype=torch.float64) for _ in range(2)]
    for use, total in zip((found, outer), sums, strict=True):
        use.add_weighted_(total, torch.tensor([0.5, 0.0, -1.0]))
    assert torch.allclose(*sums, rtol=1e-12)


def test_a_position_is_used_by_any_number_of_any_example() -> None:
    left, right = some(torch.float32)
    left[2, 4, 3] = 1e-45
    assert without_idle(Outer(Dense(left), Dense(right))).left.tensor.shape[1] == 3


@pytest.mark.parametrize("value", [2e6, 1e17, 5e18, math.inf, math.nan])
@pytest.mark.parametrize("position", [3, 6])
@pytest.mark.parametrize("is_right", [False, True])
def test_beside_what_is_large_nothing_is_left_out(value: float, position: int, is_right: bool) -> None:
    """Or else it would depend on the other examples whether this one is left out."""
    left, right = some(torch.float32)
    (right if is_right else left)[1, position, 2] = value
    outer = Outer(Dense(left), Dense(right))
    assert without_idle(outer) is outer


@pytest.mark.parametrize(("size", "small", "position"), [(5e18, 1.0, 3), (math.inf, 1.0, 3), (1e19, 1e-19, 1)])
def test_whether_an_example_has_a_finite_norm_follows_from_it_alone(size: float, small: float, position: int) -> None:
    """Of rows that no gradient meets the bound on rounding may be infinite; of others the norm, in one of two forms."""
    left, right = some(torch.float32)
    left[0] *= small
    right[0, position] = size
    others = left.clone()
    others[1:] = 1.0
    for form in (lambda outer: outer, Outer.settled):
        pairs = [squared_norms([form(without_idle(Outer(Dense(side), Dense(right))))]) for side in (left, others)]
        alone, beside = (norms + rounding for norms, rounding in pairs)
        assert bool(alone[0].isfinite()) == bool(beside[0].isfinite())
        assert bool(torch.stack([alone, beside])[:, 1:].isfinite().all())


def test_without_any_gradient_one_position_is_left() -> None:
    left, right = some()
    found = without_idle(Outer(Dense(left.zero_()), Dense(right)))
    assert found.left.tensor.shape == (B, 1, P)
    assert squared_norms([found])[0].tolist() == [0.0] * B


def test_what_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = some()
    ids = OneHot(torch.zeros(B, T, dtype=torch.int64), P)
    full = left.clone()
    full[:, :5] = 1.0
    single = Outer(Dense(left[:, :1]), Dense(right[:, :1]))
    for outer in (Outer(ids, Dense(torch.zeros_like(right))), Outer(Dense(full), Dense(right)), single):
        assert without_idle(outer) is outer
    monkeypatch.setattr(idle_module, "answers_at_once", lambda device: False)
    elsewhere = Outer(Dense(left), Dense(right))
    assert without_idle(elsewhere) is elsewhere


def test_the_last_layer_of_a_classifier_keeps_one_position() -> None:
    def first_position(module: Any, x: Tensor) -> Tensor:
        hidden: Tensor = module.last(torch.tanh(module.first(x)))
        return hidden[:, 0]

    model = Small(first_position, first=nn.Linear(D, P), last=nn.Linear(P, 40))
    given = batch(B, T, D)
    for hidden in (given, {"x": torch.cat([given["x"], given["x"].flip(1)], 1)}):
        found = record(model, square, hidden)
        assert {use.left.tensor.shape[1] for use in found.factors["last.weight"]} == {1}
        assert relative_error(found, loop(model, square, hidden)) < 1e-10
