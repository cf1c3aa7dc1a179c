"""Rounding is told from what a model does by computing in more bits, which changes nothing for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight, record
from hf_dp.per_example.precision import computed_in, noting_16_bits
from tests.per_example.small import Small, batch, square
from tests.zoo import adapted, text_batch, tiny


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


def rescaled(model: Any, x: Tensor) -> Tensor:
    """Whose frozen numbers are cast, and the casts written into."""
    weight, scale = model.frozen.weight.float(), model.table.to(torch.float32)
    weight.data.float().neg_()
    weight.mul_(scale.exp_().mean())
    out: Tensor = model.linear(x) @ weight
    return out


def test_what_is_written_into_a_cast_is_not_written_into_the_weight() -> None:
    model = Small(rescaled, linear=nn.Linear(4, 4), frozen=nn.Linear(4, 4).requires_grad_(False)).float()
    model.frozen.bfloat16()
    model.register_buffer("table", torch.full((3,), 0.5, dtype=torch.bfloat16))
    given = {"x": batch(3, 5, 4)["x"].float()}
    expected = model(given["x"])
    with computed_in(model, given, torch.float32):
        for _ in range(2):
            torch.testing.assert_close(model(given["x"]), expected)
    preflight(model.train(), square, given)


class Quantised(nn.Module):
    """Frozen integers times a scale, with an adapter beside them."""

    def __init__(self, replaced: Any, scale: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(replaced.weight.numel())
        values = torch.randint(-127, 128, replaced.weight.shape, dtype=torch.int8, generator=generator)
        self.register_buffer("values", values)
        self.scale = scale
        self.a = nn.Linear(replaced.in_features, 3, bias=False)
        self.b = nn.Linear(3, replaced.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.values.to(x.dtype) * self.scale) + self.b(self.a(x))


@pytest.mark.slow
def test_large_quantised_weights_round_and_are_not_refused() -> None:
    """In float32 two ways to add the same numbers differ by 6 % behind six layers of these."""
    model = tiny("llama", "causal_lm", torch.float32, num_hidden_layers=6).requires_grad_(False)
    torch.manual_seed(0)
    for layer in model.model.layers:
        for owner, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                setattr(owner, f"{name}_proj", Quantised(getattr(owner, f"{name}_proj"), 1.0))
    preflight(model.train(), per_example_losses, text_batch("causal_lm", dtype=torch.float32))


@pytest.mark.slow
def test_parts_in_float32_of_a_model_in_float64_are_not_refused() -> None:
    for name, head in (("granite_swa", "causal_lm"), ("modernbert", "choice")):
        preflight(tiny(name, head), per_example_losses, text_batch(head))


def leaking(m: Any, x: Tensor) -> Tensor:
    """By less than bf16 rounds."""
    return m.linear(x + 0.01 * x.mean(0)).cos()


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_less_than_rounding_in_16_bits_is_seen_all_the_same(autocast: bool) -> None:
    def loss(model: nn.Module, data: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return square(model, data)

    def model(function: Any) -> nn.Module:
        return Small(function, linear=nn.Linear(4, 4)).to(torch.float32 if autocast else torch.bfloat16)

    data = {"x": batch(3, 5, 4)["x"].to(torch.float32 if autocast else torch.bfloat16)}
    preflight(model(lambda m, x: m.linear(x).cos()), loss, data)
    with pytest.raises(PreflightError, match="depends on its neighbours"):
        preflight(model(leaking), loss, data)


def test_what_checkpoints_compute_again_is_not_rounded_either() -> None:
    """They note the autocast around them, and would compute under it again in the backward pass."""

    def gradients(autocast: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = per_example_losses(model, data).sum()
        return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))

    model: Any = adapted("LoRA", torch.float32)
    data = text_batch("causal_lm", dtype=torch.float32)
    exact = gradients(autocast=False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    with computed_in(model, data, torch.float32):
        assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(gradients(True), exact, strict=True))
    assert layers
    assert all(layer.gradient_checkpointing for layer in layers)
    assert not all(torch.allclose(*pair, rtol=1e-3) for pair in zip(gradients(True), exact, strict=True))


def test_a_kernel_for_16_bits_only_is_checked_in_these() -> None:
    def only_16_bits(m: Any, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            raise RuntimeError("only bf16")
        return m.linear(x).cos()

    model = Small(only_16_bits, linear=nn.Linear(4, 4)).bfloat16()
    preflight(model, square, {"x": batch(3, 5, 4)["x"].bfloat16()})


def under_autocast(model: nn.Module) -> nn.Module:
    """As accelerate does it: within the model's own forward."""
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    return model


def of(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2)).to(dtype)


@pytest.mark.parametrize(
    ("model", "is_noted"),
    [
        (of(torch.float32), False),
        (of(torch.float64), False),
        (of(torch.bfloat16), True),
        (of(torch.float16), True),
        (under_autocast(of(torch.float32)), True),
    ],
    ids=["float32", "float64", "bfloat16", "float16", "autocast"],
)
def test_16_bits_are_noted(model: nn.Module, is_noted: bool) -> None:
    with noting_16_bits(model) as are_noted:
        model(torch.zeros(1, 2, dtype=next(model.parameters()).dtype))
    assert are_noted() == is_noted
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_autocast_around_a_pass_is_noted_and_none_around_others() -> None:
    model = of(torch.float32)
    with noting_16_bits(model) as are_noted:
        model(torch.zeros(1, 2))
        assert not are_noted()
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(1, 2))
    assert are_noted()


@pytest.mark.parametrize("cast", [Tensor.bfloat16, Tensor.half, lambda w: w.to(torch.bfloat16)])
def test_a_weight_that_a_model_casts_by_itself_is_exact(cast: Any) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        lowered: Tensor = nn.functional.linear(cast(x), cast(model.linear.weight))
        return lowered.float() * cast(model.scale).float()

    model = Small(forward, linear=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4)))
    data = {"x": batch(3, 5, 4)["x"].float()}
    assert preflight(model, square, data).covers(record(model, square, data).uses)
