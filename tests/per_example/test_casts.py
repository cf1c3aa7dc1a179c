"""Under autocast factors are what was multiplied, in its bits, and one cast is made for all layers of an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight, record
from hf_dp.per_example.casts import Casts
from hf_dp.per_example.factors import Outer
from hf_dp.per_example.oracle import loop
from tests.per_example.small import Small, batch
from tests.zoo import text_batch, tiny


def under_autocast(model: Any, given: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return per_example_losses(model, given)


def test_both_factors_are_in_fewer_bits_and_shared_by_what_shares_an_input() -> None:
    model = tiny("llama", "causal_lm", torch.float32, num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    given = text_batch("causal_lm", dtype=torch.float32)
    preflight(model, under_autocast, given)
    found = record(model, under_autocast, given)
    outers = {n: [f for f in fs if isinstance(f, Outer)] for n, fs in found.factors.items() if "_proj" in n}
    assert {side.tensor.dtype for fs in outers.values() for f in fs for side in (f.left, f.right)} == {torch.bfloat16}
    inputs = {name: fs[0].right.tensor.data_ptr() for name, fs in outers.items() if "down" not in name}
    q, k, v = (inputs[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    gate, up = (inputs[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert q == k == v != gate == up


def test_the_last_cast_is_of_the_same_numbers() -> None:
    casts, leaf = Casts(), torch.randn(2, 3, 4, requires_grad=True)

    def cast_of(values: Tensor, is_new: bool = True) -> Tensor:
        cast, was_made = casts.of(values)
        assert was_made == is_new
        return cast

    x = leaf * 1
    assert cast_of(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        first = cast_of(x)
        assert cast_of(x, is_new=False) is first
        assert torch.equal(first, x.bfloat16())
        for other in (x[:1], x.mT, x.double(), x.bfloat16(), x.clone(), x.data, x.view_as(x)):
            expected = other.bfloat16() if other.dtype == torch.float32 else other
            assert torch.equal(cast_of(other), expected)
        again = cast_of(x)
        x.mul_(2)
        assert torch.equal(cast_of(x), x.bfloat16())
        assert not torch.equal(again, cast_of(x, is_new=False))
        data = torch.ones(2)
        cast_of(data)
        data.numpy()[:] = 0
        assert cast_of(data).sum() == 0
    with torch.autocast("cpu", torch.float16):
        assert cast_of(x).dtype == torch.float16


def written_into(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x).float()
    first = m.other(x)
    x.mul_(3)
    return first.float().cos() + m.last(x).float().sin()


def of_another_sign(m: Any, x: Tensor) -> Tensor:
    """Two views of the same numbers."""
    z = torch.fft.fft(m.linear(x).float(), dim=-1)
    return m.other(z.imag).float() + 2 * m.last(z.conj().imag).float().tanh()


def by_what_torch_does_not_count(m: Any, x: Tensor) -> Tensor:
    """The result is what the model says, whatever becomes of its gradient."""
    x = m.linear(x).float()
    first = m.other(x).detach()
    x.data.add_(1)
    return first.float().cos() + m.last(x).float().sin()


@pytest.mark.parametrize("function", [written_into, of_another_sign, by_what_torch_does_not_count])
def test_losses_are_those_of_the_model(function: Any) -> None:
    model = Small(function, linear=nn.Linear(4, 4), other=nn.Linear(4, 4), last=nn.Linear(4, 4)).float()
    given = {"x": batch(3, 5, 4)["x"].float()}

    def losses(model: Any, given: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(given["x"]).square().flatten(1).mean(1)

    found, truth = record(model, losses, given), loop(model, losses, given)
    torch.testing.assert_close(found.losses, losses(model, given).detach())
    if function is by_what_torch_does_not_count:
        return
    weights = torch.ones(3)
    for name, value in truth.weighted_sum(weights).items():
        torch.testing.assert_close(found.weighted_sum(weights)[name], value.float(), rtol=2e-2, atol=5e-2)


class OneTypeEach(TorchDispatchMode):
    """The types that are given to the kernels of norms, of which CUDA's take one alone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "norm_backward" in func.overloadpacket.__name__:
            gradient, x, *others = (a for a in args if isinstance(a, Tensor) and a.is_floating_point())
            # The mean and the deviation are in float32 on a GPU, whatever else is.
            self.types.append({value.dtype for value in (gradient, x, *others[2:])})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "head"), [("modernbert", "sequence"), ("bert", "masked_lm"), ("gpt2", "causal_lm")])
def test_norms_under_autocast_are_given_one_type(name: str, head: str) -> None:
    model, given = tiny(name, head, torch.float32), text_batch(head, dtype=torch.float32)
    with OneTypeEach() as seen:
        record(model, under_autocast, given)
    assert len(seen.types) > 2
    assert all(len(found) == 1 for found in seen.types)
