"""Axes are read where no other has as many entries, also of what the backward pass computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.checks.survey import survey, telling_sizes
from tests.per_example.small import Small, batch, parameter, relative_error, square


def in_checkpoint(function: Any) -> Any:
    def outer(m: Any, x: Tensor) -> Tensor:
        return checkpoint(function, m, x.requires_grad_(), use_reentrant=True) if m.training else function(m, x)

    return outer


def looked_up(m: Any, x: Tensor) -> Tensor:
    """As VBLoRA: which rows, the parameters say."""
    return F.linear(x, m.w.exp()[m.scores.topk(2).indices].sum(1)).cos()


def scaled(m: Any, x: Tensor) -> Tensor:
    """As UniLoRA: entries that are chosen once, times others that all examples share."""
    return F.linear(x, m.v[m.chosen] * m.scales).cos()


def with_buffers(function: Any, size: int) -> Small:
    model = Small(function, v=parameter(7))
    model.register_buffer("chosen", torch.arange(4 * size).view(size, 4) % 7)
    model.register_buffer("scales", torch.linspace(0.5, 2, 4 * size, dtype=torch.float64).view(size, 4))
    return model


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_where_all_is_in_checkpoints_checks_read_as_was_seen(size: int) -> None:
    model, data = Small(in_checkpoint(looked_up), w=parameter(5, 4), scores=parameter(6, 5)), batch(size, 5, 4)
    certificate = preflight(model, square, batch(3, 5, 4))
    found = record(model, square, data, certificate=certificate if size == 1 else None)
    assert relative_error(found, loop(model, square, data)) <= 1e-12


@pytest.mark.parametrize("is_checkpointed", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_what_all_share_may_have_as_many_rows_as_there_are_examples(size: int, is_checkpointed: bool) -> None:
    model, data = with_buffers(in_checkpoint(scaled) if is_checkpointed else scaled, size), batch(size, 5, 4)
    certificate = preflight(model, square, batch(3, 5, 4))
    found = record(model, square, data, certificate=certificate if size == 1 else None)
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_a_number_is_passed_over_that_divides_what_no_parameter_has() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        dense = torch.zeros(21, 4, dtype=x.dtype)
        dense[m.places, 1] = m.w
        return F.linear(x, dense)

    model, data = Small(function, w=parameter(2)), batch(3, 5, 4)
    model.places = torch.tensor([4, 16])
    assert telling_sizes(model, data)[:2] == [3, 7]
    found = record(model, square, data, certificate=preflight(model, square, data))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_numbers_divide_no_axis_of_what_is_frozen() -> None:
    model = Small(lambda m, x: m.linear(x), linear=nn.Linear(4, 3))
    model.register_buffer("table", torch.zeros(35, 2))
    model.linear.requires_grad_(False)
    assert telling_sizes(model, batch(2, 4, 4))[:2] == [11, 13]


def test_what_is_refused_with_each_number_is_refused() -> None:
    model = Small(lambda m, x: torch.linalg.multi_dot([x[:, 0], m.w]), w=parameter(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"parameter w is used by .*multi_dot"):
        survey(model, square, batch(3, 5, 4))
