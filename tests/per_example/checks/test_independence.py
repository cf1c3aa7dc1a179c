"""What one example beside others is held by: all that operations are given, but frozen parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import HfDpError
from hf_dp.per_example import preflight
from hf_dp.per_example.bits import bits_in_place
from hf_dp.per_example.checks.memory import unchanged_weights
from hf_dp.per_example.checks.observed import observer
from hf_dp.per_example.checks.state import unchanged_state
from hf_dp.per_example.rule import Axis
from tests.per_example.small import Small, batch, parameter, square


def test_frozen_parameters_are_not_copied_and_all_else_is() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    rows_of, constant = observer(model), Axis(4, "constant")
    told = rows_of(model.bias, constant)
    model.bias.data = model.bias.data.flip(0)
    assert not torch.equal(rows_of(model.bias, constant), told), "the same numbers in another order"
    assert rows_of(model.weight, constant).shape == (1, 6)
    same = nn.Parameter(model.bias.detach(), requires_grad=False)
    for other in (same, model.bias.detach(), model.bias.clone()):
        assert torch.equal(rows_of(other, constant), model.bias[None])
    assert rows_of(torch.ones(8, 3), Axis(4, "folded")).shape == (4, 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_numbers_in_other_places_have_other_checksums(dtype: torch.dtype) -> None:
    numbers = torch.arange(2 * 3 * 4).view(2, 3, 4).to(dtype)
    told = bits_in_place(numbers)
    assert len(told) < numbers.numel()
    assert torch.equal(bits_in_place(numbers.clone()), told)
    assert not any(torch.equal(bits_in_place(numbers.flip(axis)), told) for axis in range(3))


def written(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model.frozen.copy_(x.mean(0))


def in_its_place(model: Any, x: Tensor) -> None:
    model.frozen = nn.Parameter(x.mean(0), requires_grad=False)


@pytest.mark.parametrize("change", [written, in_its_place])
def test_the_mean_of_a_batch_in_a_frozen_parameter_is_refused(change: Any) -> None:
    """What a trained parameter is added to is otherwise what all examples share."""

    def function(model: Any, x: Tensor) -> Tensor:
        change(model, x)
        return x @ torch.diag(model.own + model.frozen)

    def still(model: Any, x: Tensor) -> Tensor:
        return x @ torch.diag(model.own + model.frozen)

    def made(of: Any) -> Small:
        model = Small(of, own=parameter(3), frozen=parameter(3))
        model.frozen.requires_grad_(False)
        return model

    preflight(made(still), square, batch(4, 3))
    with pytest.raises(HfDpError, match="frozen|neighbours|differently"):
        preflight(made(function), square, batch(4, 3))


@pytest.mark.parametrize("how", ["replaced data", "written data"])
def test_failure_106_what_is_written_into_a_frozen_parameter_and_back_is_refused(how: str) -> None:
    """Where torch counts no write, in training mode alone, by a term of which losses show nothing."""

    def put(p: Tensor, value: Tensor) -> None:
        if how == "replaced data":
            p.data = value
        else:
            p.data.copy_(value)

    def function(model: Any, x: Tensor) -> Tensor:
        before = model.frozen.detach().clone()
        put(model.frozen, x.mean(0) if model.training and model.mixes else before)
        hidden = x * (model.own * model.frozen)
        put(model.frozen, before)
        return model.layer(x) + hidden - hidden.detach()

    def made(mixes: bool) -> Small:
        model = Small(function, own=parameter(3), frozen=parameter(3), layer=nn.Linear(3, 3))
        model.frozen.requires_grad_(False)
        model.mixes = mixes  # type: ignore[assignment]
        return model

    preflight(made(False), square, batch(4, 3))
    model = made(True)
    with pytest.raises(HfDpError, match="neighbours"), unchanged_weights(model), unchanged_state(model):
        preflight(model, square, batch(4, 3))
