"""Models that draw numbers of their own for each example in eval mode too are certified, and still held to be exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.per_example import preflight
from hf_dp.per_example.rules import RULES
from tests.per_example.small import Small, batch, square


def of_noise(model: Any, x: Tensor) -> Tensor:
    """As a variational autoencoder, also in eval mode."""
    return model.linear(x + torch.randn_like(x)).cos()


def of_steps_and_noise(model: Any, x: Tensor) -> Tensor:
    """As a diffusion model is trained: how much noise is drawn too."""
    share = torch.linspace(0.1, 0.9, 10, dtype=x.dtype)[torch.randint(0, 10, (len(x),))][:, None, None]
    return model.linear(share * x + (1 - share) * torch.randn_like(x)).cos()


def of_some_positions(model: Any, x: Tensor) -> Tensor:
    """As a masked autoencoder, which chooses its positions itself."""
    kept = torch.rand(x.shape[:2]).argsort(1)[:, :3, None].expand(-1, -1, x.shape[2])
    return model.linear(x.gather(1, kept)).cos()


def of_noise_of_time_first(model: Any, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape[1] * len(x), x.shape[2], dtype=x.dtype).view(x.shape[1], len(x), -1)
    return model.linear(x + noise.transpose(0, 1)).cos()


@pytest.mark.parametrize("function", [of_noise, of_steps_and_noise, of_some_positions, of_noise_of_time_first])
def test_numbers_of_each_example_are_drawn_in_eval_mode_too(function: Any) -> None:
    model = Small(function, linear=nn.Linear(4, 4))
    assert preflight(model, square, batch(3, 5, 4))
    with torch.no_grad():
        assert not torch.equal(*(model(batch(3, 5, 4)["x"]) for _ in range(2)))


def centred_noise(model: Any, x: Tensor) -> Tensor:
    return model.linear((x - x.mean(0).detach()) * (1 + 0.1 * torch.rand_like(x))).cos()


def noise_by_place(model: Any, x: Tensor) -> Tensor:
    place = torch.arange(len(x), dtype=x.dtype)[:, None, None]
    return model.linear(x * (1 + place) + torch.randn_like(x)).cos()


@pytest.mark.parametrize("function", [centred_noise, noise_by_place])
def test_examples_that_mix_amid_numbers_of_all_modes_are_refused(function: Any) -> None:
    with pytest.raises(PreflightError, match=r"neighbours|by their places"):
        preflight(Small(function, linear=nn.Linear(4, 4)), square, batch(3, 5, 4))


def test_a_gradient_that_is_not_exact_amid_numbers_of_all_modes_is_refused() -> None:
    def twice(values: Any, operands: Any, gradient: Tensor, axis: Any, needs_input: bool) -> Any:
        given, factors = RULES[nn.functional.linear].backward(values, operands, gradient, axis, needs_input)
        return given, {name: None if f is None else f.scaled(2.0) for name, f in factors.items()}

    rules = {**RULES, nn.functional.linear: dataclasses.replace(RULES[nn.functional.linear], backward=twice)}
    with pytest.raises(PreflightError, match="off by"):
        preflight(Small(of_noise, linear=nn.Linear(4, 4)), square, batch(3, 5, 4), rules=rules)
