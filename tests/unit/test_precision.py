"""Rounding is told from what a model does by computing in more bits, which changes nothing for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.per_example.precision import computed_in
from tests.unit.small import Small


def casting(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        lowered = model.linear(x).bfloat16().half().to(torch.bfloat16)
        return torch.softmax(lowered, -1, dtype=torch.float32) + lowered.float().type(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("before", [torch.bfloat16, torch.float32])
def test_nothing_is_rounded_and_everything_comes_back(before: torch.dtype, dtype: torch.dtype) -> None:
    model = Small(casting, linear=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(2))).to(before)
    model.register_buffer("table", torch.full((3,), 0.1, dtype=before))
    model.scale.grad = torch.ones_like(model.scale)
    kept = {name: value.data_ptr() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(before)
    weight, bias = model.linear.weight.detach().double(), model.linear.bias.detach().double()
    exact = nn.functional.linear(x.double(), weight, bias)
    rounded = model(x).double()
    with computed_in(model, {"x": x, "n": 3}, dtype) as batch:
        found = model(batch["x"])
        assert (found.dtype, model.table.dtype, batch["n"]) == (dtype, dtype, 3)
    error = {torch.float32: 1e-5, torch.float64: 1e-14}[dtype]
    assert torch.allclose(found.double(), exact.softmax(-1) + exact, rtol=0, atol=error)
    assert not torch.allclose(rounded, exact.softmax(-1) + exact, rtol=0, atol=1e-4)
    now = {name: value.data_ptr() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert now == kept
    assert {p.dtype for p in model.parameters()} == {before}
    assert torch.equal(model.scale.grad, torch.ones_like(model.scale))


def test_they_come_back_after_an_error() -> None:
    model = Small(casting, linear=nn.Linear(4, 4)).bfloat16()
    with pytest.raises(ZeroDivisionError), computed_in(model, {}, torch.float32):
        raise ZeroDivisionError
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
