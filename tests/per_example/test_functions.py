"""Autograd Functions of parameters and data: run again for each example, and held against what is computed for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_dp.errors import PreflightError
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.functions import Applied, by_rows, functions_seen
from tests.per_example.small import Small, batch, parameter, relative_error, square
from tests.per_example.uses import Product


class Centred(Product):
    """Each example sees the mean of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return Product.forward(ctx, x - x.mean(0, keepdim=True), w)


@pytest.mark.parametrize("has_certificate", [True, False])
def test_one_that_mixes_examples_is_found(has_certificate: bool) -> None:
    model = Small(lambda m, x: Centred.apply(m.linear(x), m.w).cos(), linear=nn.Linear(4, 4), w=parameter(4, 5))
    with pytest.raises(PreflightError, match="neighbours"):
        (preflight if has_certificate else record)(model, square, batch(3, 5, 4))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_arguments_that_a_checkpoint_keeps(size: int) -> None:
    """They are put away by a Function of nothing else."""

    def function(m: Any, x: Tensor) -> Tensor:
        return x * checkpoint(torch.exp, m.w, use_reentrant=False)

    model, data = Small(function, w=parameter(4)), batch(size, 5, 4)
    found = record(model, square, data, certificate=preflight(model, square, batch(3, 5, 4)))
    assert relative_error(found, loop(model, square, data)) <= 1e-12


def test_one_of_nothing_but_an_empty_tensor_is_left_alone() -> None:
    """Some checkpoints keep their arguments by such a one."""
    empty = torch.empty(0, requires_grad=True)
    assert by_rows(Applied(Product, Product.apply), (empty, "kept"), {}, [empty]) is None


def test_all_is_as_it_was_afterwards() -> None:
    apply, sparse = torch.autograd.Function.__dict__["apply"], torch.sparse_coo_tensor
    with functions_seen():
        assert torch.autograd.Function.__dict__["apply"] is not apply
        assert torch.sparse_coo_tensor is not sparse
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch.sparse_coo_tensor is sparse
