"""Tensors that parameters are written into: known where nothing else shares their memory, else refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.filled import is_writing
from hf_dp.per_example.watched import WatchedParameter
from tests.per_example.small import Small, batch, parameter, relative_error, square
from tests.per_example.uses import EXACT

ROWS = torch.tensor([0, 3])
WRITTEN = [name for name in EXACT if "written" in name or "Fourier" in name or "sparse" in name]


def zeros() -> Tensor:
    return torch.zeros(4, 4, dtype=torch.float64)


def through_a_view(w: Tensor) -> Tensor:
    dense = zeros()
    dense.view(-1)[ROWS] = w
    return dense


def under_a_view(w: Tensor) -> Tensor:
    dense = zeros()
    view = dense.view(2, 8)
    dense[0, ROWS] = w
    return view.view(4, 4) + dense


def under_what_is_detached(w: Tensor) -> Tensor:
    dense = zeros()
    dense[0, ROWS] = w
    kept = dense.detach()
    dense.add_(w.sum())
    return dense + kept


def under_a_later_view(w: Tensor) -> Tensor:
    dense = zeros()
    dense[0, ROWS] = w
    view = dense.T
    dense.add_(w.sum())
    return dense @ view


def over_an_array(w: Tensor) -> Tensor:
    array = np.zeros((4, 4))
    dense = torch.from_numpy(array)
    dense[0, ROWS] = w
    array += 1
    return dense


def expanded(w: Tensor) -> Tensor:
    dense = torch.zeros(1, 1, dtype=torch.float64).expand(4, 4)
    dense.add_(w.sum())
    return dense


def without_gradients(w: Tensor) -> Tensor:
    dense = zeros()
    dense[0, ROWS] = w
    with torch.no_grad():
        dense.clamp_(max=1)
    return dense


def into_a_parameter(w: Tensor) -> Tensor:
    with torch.no_grad():
        w.copy_(w.clamp(max=1.0))
    return w * w[:, None]


@pytest.mark.parametrize(
    "weight",
    [
        through_a_view,
        under_a_view,
        under_what_is_detached,
        under_a_later_view,
        over_an_array,
        expanded,
        without_gradients,
    ],
)
def test_what_shares_memory_is_refused_by_name(weight: Callable[[Tensor], Tensor]) -> None:
    model = Small(lambda m, x: F.linear(x, weight(m.w)).cos(), w=parameter(2))
    with pytest.raises(UnsupportedModelError, match="parameter w is used by operation"):
        record(model, square, batch(3, 5, 4))


def test_a_parameter_that_is_written_to_is_refused_by_name() -> None:
    model = Small(lambda m, x: F.linear(x, into_a_parameter(m.w)).cos(), w=parameter(4))
    with pytest.raises(UnsupportedModelError, match=r"parameter w is used by operation .*copy_"):
        record(model, square, batch(3, 5, 4))


def test_failure_84_a_parameter_whose_data_are_replaced_is_refused_by_name() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        m.w.data = m.w.data.clamp(max=1.0)
        return x * m.w

    with pytest.raises(UnsupportedModelError, match=r"parameter w is used by operation .*__set__"):
        record(Small(function, w=parameter(4)), square, batch(3, 5, 4))


def test_a_frozen_parameter_that_is_written_to_is_refused_by_name() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        m.frozen.add_(m.w)
        return F.linear(x, m.frozen)

    model = Small(function, w=parameter(4), frozen=parameter(4, 4).requires_grad_(False))
    with pytest.raises(UnsupportedModelError, match="parameter w is used by operation"):
        record(model, square, batch(3, 5, 4))


def test_data_that_a_parameter_is_written_into_is_refused_by_name() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = m.w
        return y.cos()

    with pytest.raises(UnsupportedModelError, match="parameter w is used by operation .*setitem"):
        record(Small(function, w=parameter(4)), square, batch(3, 5, 4))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.slow
def test_in_checkpoints(name: str, use_reentrant: bool, size: int) -> None:
    inner = EXACT[name].function

    def outer(m: Any, x: Tensor) -> Tensor:
        if not m.training:
            return inner(m, x)
        return checkpoint(inner, m, x.requires_grad_(), use_reentrant=use_reentrant)

    members = {**EXACT[name]._modules, **EXACT[name]._parameters}
    model, data = Small(outer, **members), batch(size, 5, 4)
    certificate = preflight(model, square, batch(3, 5, 4))
    truth = loop(model, square, data)
    assert relative_error(record(model, square, data, certificate=certificate), truth) <= 1e-12
    if size > 1:
        assert relative_error(record(model, square, data), truth) <= 1e-12


@pytest.mark.parametrize("is_changed", [True, False])
def test_what_it_was_used_for_before_it_was_written_once_more(is_changed: bool) -> None:
    """Each use hands on to what was there at its time."""

    def function(m: Any, x: Tensor) -> Tensor:
        dense = zeros()
        dense[1] = m.v
        first = F.linear(x.detach(), dense)
        if is_changed:
            dense += m.v.cos()
        else:
            dense[2] = m.v.cos()
        return first + F.linear(x.detach().cos(), dense)

    model, data = Small(function, v=parameter(4)), batch(3, 5, 4)
    assert relative_error(record(model, square, data), loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("size", [1, 3])
def test_of_one_example_what_all_share_may_have_one_row(size: int) -> None:
    """OFT with one block for all solves equations whose sides are such."""

    def function(m: Any, x: Tensor) -> Tensor:
        one = torch.eye(4, dtype=x.dtype)[None]
        return x.cos() @ torch.linalg.solve(one + m.w.sinh(), one - m.w.sinh())[0]

    model, data = Small(function, w=parameter(1, 4, 4)), batch(size, 5, 4)
    certificate = preflight(model, square, batch(3, 5, 4))
    assert relative_error(record(model, square, data, certificate=certificate), loop(model, square, data)) <= 1e-12


def positions(m: Any) -> Tensor:
    """(5, 4) of parameters alone."""
    made: Tensor = m.first(torch.arange(10, dtype=torch.float64).view(5, 2).sin())
    return made


def beside_what_was_derived(m: Any) -> Tensor:
    y = positions(m)
    derived = y + 1
    return F.relu(y, inplace=True) + derived


IN_PLACE: dict[str, Callable[[Any], Tensor]] = {
    "an activation": lambda m: F.relu(positions(m), inplace=True),
    "one with a slope": lambda m: F.leaky_relu(positions(m), 0.1, True),
    "two": lambda m: F.silu(F.hardtanh(positions(m), -0.5, 0.5, True), inplace=True).mul_(3),
    "through what is the same": lambda m: (lambda y: y.contiguous().mul_(2) + y)(positions(m)),
    "by itself": lambda m: positions(m).mul_(m.last.weight.sin()[:1]).relu_(),
    "beside what was derived from it": beside_what_was_derived,
    "cast to what it is": lambda m: F.relu(positions(m).to(torch.float64).contiguous(), inplace=True),
    "of a table (1, 5, 1, 4)": lambda m: F.relu(m.first(torch.ones(1, 5, 1, 2, dtype=torch.float64)), True)[0, :, 0],
}


@pytest.mark.few(12)
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_parameters_give_is_changed_in_place(name: str, size: int) -> None:
    """Swin's second version makes its position biases so, from coordinates."""
    members = {"first": torch.nn.Linear(2, 4), "last": torch.nn.Linear(4, 4)}
    model = Small(lambda m, x: m.last(x).cos() + m.last(IN_PLACE[name](m)), **members)
    data = batch(size, 5, 4)
    certificate, truth = preflight(model, square, batch(3, 5, 4)), loop(model, square, data)
    assert relative_error(record(model, square, data, certificate=certificate), truth) <= 1e-12
    if size > 1:
        assert relative_error(record(model, square, data), truth) <= 1e-12


def under_a_part(y: Tensor) -> Tensor:
    y.chunk(2, dim=1)[0].mul_(2)
    return y


def under_another(y: Tensor) -> Tensor:
    other = y.view(-1)
    y.mul_(2)
    return y + other.view(y.shape)


def after_a_use(y: Tensor) -> Tensor:
    other = y.cos()
    return F.relu(y, inplace=True) + other


def of_a_copy_of_the_data(y: Tensor) -> Tensor:
    other = y.data
    F.relu(y, inplace=True)
    return y + other


def over_its_transpose(y: Tensor) -> Tensor:
    other = y.T
    y.mul_(2)
    return y + other.T


@pytest.mark.parametrize(
    "change", [under_a_part, under_another, after_a_use, of_a_copy_of_the_data, over_its_transpose]
)
def test_what_parameters_give_is_refused_where_others_would_change_with_it(change: Callable[[Tensor], Tensor]) -> None:
    model = Small(lambda m, x: x * change(positions(m)), first=torch.nn.Linear(2, 4))
    with pytest.raises(UnsupportedModelError, match=r"parameter first\.bias, first\.weight is used by operation"):
        record(model, square, batch(3, 5, 4))


def test_a_constant_that_was_changed_and_kept_is_refused_afterwards() -> None:
    kept: list[Tensor] = []

    def function(m: Any, x: Tensor) -> Tensor:
        kept[:] = kept or [F.relu(positions(m), inplace=True)]
        return x * kept[0]

    model = Small(function, first=torch.nn.Linear(2, 4))
    with pytest.raises(UnsupportedModelError, match="an earlier pass and kept"):
        record(model, square, batch(3, 5, 4))


def test_afterwards_it_is_a_plain_tensor_without_a_gradient() -> None:
    kept: list[Tensor] = []

    def function(m: Any, x: Tensor) -> Tensor:
        dense = zeros()
        dense[0, ROWS] = m.w
        kept.append(dense)
        return F.linear(x, dense)

    model = Small(function, w=parameter(2))
    record(model, square, batch(3, 5, 4))
    assert all(type(dense) is Tensor and not dense.requires_grad for dense in kept)
    assert torch.equal(kept[-1][0, ROWS], model.w)
    assert not any(isinstance(kept[-1] * 2, WatchedParameter) for _ in "1")


def test_what_is_written_from_data_still_mixes_and_is_found() -> None:
    """A weight that holds the mean over all examples is none that all share."""

    def function(m: Any, x: Tensor) -> Tensor:
        dense = x.detach().mean((0, 1)).repeat(4, 1)
        dense[0] = m.v
        return F.linear(m.linear(x), dense).cos()

    model = Small(function, v=parameter(4), linear=torch.nn.Linear(4, 4))
    with pytest.raises(HfDpError):
        preflight(model, square, batch(4, 5, 4))


def test_which_operations_write() -> None:
    assert all(map(is_writing, ["TensorBase.add_", "TensorBase.__setitem__", "TensorBase.__iadd__", "torch.relu_"]))
    assert not any(map(is_writing, ["TensorBase.add", "TensorBase.__getitem__", "TensorBase.__invert__", "torch.relu"]))
