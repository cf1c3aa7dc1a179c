"""What constants hand on when the memory of their parameters is another's, as FSDP2 leaves it after a backward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dp.per_example.constants import Constant, by_autograd
from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.functions import Applied
from hf_dp.per_example.watched import Source, WatchedParameter


class Keeps(torch.autograd.Function):
    """A product that keeps its factors where no hook of saved tensors sees them."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        ctx.kept = first, second.t()
        return first * second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        first, second = ctx.kept
        return gradients[0] * second.t(), gradients[0] * first


def keeps(first: Any, second: Any) -> Any:
    return Keeps.apply(first, second)


def as_saved(first: Any, second: Any) -> Any:
    return first * second


def in_place(first: Any, second: Any) -> Any:
    return Writes.apply(first, second)


class Writes(torch.autograd.Function):
    """Into what it is given."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        with torch.no_grad():
            second.mul_(2)
        return first * second

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def computed(function: Any, pulled: dict[str, Tensor]) -> tuple[dict[str, Tensor], Constant]:
    """Two parameters, of which one is given as what is derived from it, and what gathers gradients of their product."""
    whole = {"first": torch.randn(3, 3, dtype=torch.float64), "second": torch.randn(3, 3, dtype=torch.float64)}

    def given(name: str, value: Tensor) -> WatchedParameter:
        def pull(factors: Factors) -> None:
            assert isinstance(factors, PerExample)
            pulled[name] = factors.values

        watch: Any = SimpleNamespace(leaked=set[str]())
        return WatchedParameter.of(Source((name,), watch, value, pull))

    made: list[Constant] = []

    def make(value: Tensor, constant: Constant, is_apart: bool) -> Any:
        made.append(constant)
        return value

    by_autograd(function, (given("first", whole["first"]), given("second", whole["second"].t())), {}, make, True)
    return whole, made[0]


@pytest.mark.parametrize("function", [as_saved, Applied(Keeps, lambda cls, *args: keeps(*args))])
def test_memory_that_is_freed_is_not_read(function: Any) -> None:
    pulled: dict[str, Tensor] = {}
    whole, constant = computed(function, pulled)
    gradients = torch.randn(2, 3, 3, dtype=torch.float64)
    truth = {"first": gradients * whole["second"].t(), "second": gradients * whole["first"]}
    for value in whole.values():
        value.untyped_storage().fill_(7)  # which torch counts as no change, as FSDP2's own
    constant.hand_on(gradients, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(pulled, truth)


def test_a_function_that_writes_into_copies_is_seen() -> None:
    with pytest.raises(RuntimeError, match="in place"):
        computed(Applied(Writes, lambda cls, *args: in_place(*args)), {})
