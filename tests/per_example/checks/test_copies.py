"""Copies of one example come out alike under the same numbers, in whatever place, and however many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.errors import PreflightError
from hf_dp.per_example import preflight
from tests.per_example.small import batch, in_training, square


def coin_of_the_third(m: Any, x: Tensor) -> Tensor:
    place = torch.arange(len(x)).eq(2)[:, None, None]
    return m.linear(torch.where(place, x * 2 * torch.rand(()), x)).cos()


def nothing_of_the_third_beside_noise_for_each(m: Any, x: Tensor) -> Tensor:
    return m.linear(x * torch.rand(len(x), 1, 1) * torch.arange(len(x)).ne(2)[:, None, None]).cos()


def dropout_of_the_last_where_rows_are_alike(m: Any, x: Tensor) -> Tensor:
    return m.linear(torch.cat([x[:-1], F.dropout(x[-1:], 0.5)]) if x.eq(x[0]).all() else x).cos()


@pytest.mark.parametrize(
    "function",
    [coin_of_the_third, nothing_of_the_third_beside_noise_for_each, dropout_of_the_last_where_rows_are_alike],
)
def test_what_becomes_of_a_place_in_the_micro_batch_is_refused(function: Any) -> None:
    with pytest.raises(PreflightError, match="random numbers move copies of one example by their places"):
        preflight(in_training(function), square, batch(3, 5, 4))


def divided_by_rows(gradient: Tensor) -> Tensor:
    return gradient / len(gradient)


def by_their_number(m: Any, x: Tensor) -> Tensor:
    h = m.linear(x) * torch.rand(len(x), 1, 1).gt(0.1)
    if h.requires_grad:
        h.register_hook(divided_by_rows)
    return h.cos()


def noise_by_their_number(m: Any, x: Tensor) -> Tensor:
    return m.linear(x + torch.randn_like(x) / len(x)).cos()


def noise_by_their_number_in_blocks(m: Any, x: Tensor) -> Tensor:
    noise = torch.randn(len(x) * x.shape[1], x.shape[2], dtype=x.dtype).view_as(x)
    return (m.linear(x + noise) * len(x)).cos()


def noise_of_time_first(m: Any, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape[1] * len(x), x.shape[2], dtype=x.dtype).view(x.shape[1], len(x), -1).transpose(0, 1)
    return m.linear(F.dropout(x, 0.3) + noise).cos()


@pytest.mark.parametrize("function", [by_their_number, noise_by_their_number, noise_by_their_number_in_blocks])
def test_a_gradient_that_follows_from_the_number_of_examples_is_refused(function: Any) -> None:
    with pytest.raises(PreflightError, match="follows from how many examples are beside it"):
        preflight(in_training(function), square, batch(3, 5, 4))


def test_numbers_of_each_example_are_the_same_in_any_number_of_them() -> None:
    assert preflight(in_training(noise_of_time_first), square, batch(3, 5, 4))
