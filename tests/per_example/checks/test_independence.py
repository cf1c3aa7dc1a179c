"""What one example beside others is held by: all that operations are given, but frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp.errors import HfDpError, PreflightError
from hf_dp.per_example import preflight
from hf_dp.per_example.bits import bits_in_place
from hf_dp.per_example.checks.independence import check_shares
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


BOUND = 1e4


def of_all(gradient: Tensor) -> Tensor:
    return gradient * (BOUND / gradient.norm()).clamp(max=1)


def of_all_or_none(gradient: Tensor) -> Tensor:
    return gradient if gradient.abs().amax() < BOUND else torch.zeros_like(gradient)


def of_each(gradient: Tensor) -> Tensor:
    norms = gradient.flatten(1).norm(dim=1)
    return gradient * (BOUND / norms).clamp(max=1).view(-1, *[1] * (gradient.dim() - 1))


def of_each_number(gradient: Tensor) -> Tensor:
    return gradient.clamp(-BOUND, BOUND)


class Bounded(nn.Module):
    """Bounds gradients on their way back, by a hook on what a layer gives, one of the layer, or a Function."""

    def __init__(self, bound: Callable[[Tensor], Tensor], by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.hidden, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.bound, self.by = bound, by
        if by == "layer":
            self.hidden.register_full_backward_hook(lambda module, given, _: (bound(given[0]),))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.words(ids).tanh()))
        if self.by == "hook" and hidden.requires_grad:
            hidden.register_hook(self.bound)
        if self.by == "Function":
            hidden = OnItsWayBack.apply(hidden, self.bound)  # type: ignore[no-untyped-call]
        output: Tensor = self.head(hidden.mean(1))
        return output


class OnItsWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.bound = bound
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.bound(gradients[0]), None


def held(bound: Callable[[Tensor], Tensor], by: str) -> None:
    data = {"ids": torch.arange(12).view(3, 4).remainder(9), "labels": torch.tensor([0, 1, 2])}
    preflight(Bounded(bound, by), lambda m, b: F.cross_entropy(m(b["ids"]), b["labels"], reduction="none"), data)


@pytest.mark.parametrize("by", ["hook", "layer", "Function"])
@pytest.mark.parametrize("bound", [of_all, of_all_or_none], ids=lambda bound: bound.__name__)
def test_failure_158_what_a_backward_pass_bounds_by_the_gradients_of_all(
    bound: Callable[[Tensor], Tensor], by: str
) -> None:
    with pytest.raises(PreflightError, match="for one example depends on the losses of others"):
        held(bound, by)


@pytest.mark.parametrize("by", ["hook", "layer", "Function"])
@pytest.mark.parametrize("bound", [of_each, of_each_number], ids=lambda bound: bound.__name__)
def test_what_it_bounds_of_each_example_is_exact(bound: Callable[[Tensor], Tensor], by: str) -> None:
    held(bound, by)


DATA = {"ids": torch.arange(12).view(3, 4).remainder(9), "labels": torch.tensor([0, 1, 2])}


def shared(model: nn.Module, size: int = 3) -> None:
    data = {name: values[:size] for name, values in DATA.items()}
    check_shares(model, lambda m, b: F.cross_entropy(m(b["ids"]).float(), b["labels"], reduction="none"), data)


def test_in_float16_a_loss_beyond_all_numbers_hides_no_common_bound() -> None:
    shared(Bounded(of_each, "hook").half())
    with pytest.raises(PreflightError, match="for one example depends on the losses of others"):
        shared(Bounded(of_all, "hook").half())


@pytest.mark.parametrize("size", [2, 3])
def test_each_example_is_looked_at(size: int) -> None:
    """Also the last one, which is given the gradient of the first."""
    shared(Bounded(lambda g: g, "hook"), size)
    with pytest.raises(PreflightError, match="for one example depends on the losses of others"):
        shared(Bounded(lambda g: torch.cat([g[:-1], g[:1]]), "hook"), size)
