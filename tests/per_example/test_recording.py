"""What one recording costs, and what it leaves behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight, record
from tests.per_example.small import Small, batch, square
from tests.zoo import text_batch, tiny


def test_one_forward_and_one_backward_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny("gpt2", "causal_lm"), text_batch("causal_lm", size=11)
    certificate = preflight(model, per_example_losses, batch)
    calls = {"forward": 0, "backward": 0}
    model.transformer.h[0].register_forward_hook(lambda *_: calls.update(forward=calls["forward"] + 1))
    run = torch.autograd.backward

    def counted(*args: Any, **options: Any) -> None:
        calls["backward"] += 1
        run(*args, **options)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    parameters = dict(model.named_parameters())
    for p in parameters.values():
        p.grad = torch.full_like(p, 3.0)
    before = {name: (p, p.detach().clone()) for name, p in parameters.items()}
    for options, forward in (({}, 3), ({"certificate": certificate}, 1)):
        calls.update(forward=0, backward=0)
        found = record(model, per_example_losses, batch, **options)
        found.squared_norms(), found.weighted_sum(torch.ones(11))
        assert calls == {"forward": forward, "backward": 1}
    assert dict(model.named_parameters()).keys() == before.keys()
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert torch.equal(p, before[name][1])
        assert p.grad.eq(3.0).all()
        assert type(p) is nn.Parameter


@pytest.mark.parametrize("function", [Tensor.exp, Tensor.tanh, lambda p: p.softmax(-1)])
def test_a_constant_whose_result_is_kept_for_the_backward_pass_is_let_go(function: Any) -> None:
    """Otherwise each step would take more memory than the one before."""

    def values() -> int:
        gc.collect()
        return sum(type(one) is Tensor for one in gc.get_objects())

    model = Small(
        lambda m, x: m.linear(x) + function(m.bias), linear=nn.Linear(4, 4), bias=nn.Parameter(torch.ones(5, 4))
    )
    data = batch(3, 5, 4)
    certificate = preflight(model.double(), square, data)
    numbers = []
    for _ in range(3):
        record(model, square, data, certificate=certificate).squared_norms()
        numbers.append(values())
    assert numbers[0] == numbers[2]


@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_exception_leaves_the_model_as_it_was(where: str) -> None:
    model, batch = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    before = dict(model.named_parameters())
    for p in before.values():
        p.grad = torch.ones_like(p)

    def fail(model: Any, batch: Any) -> Tensor:
        if where == "loss":
            per_example_losses(model, batch)
        raise KeyError("stop")

    with pytest.raises(KeyError):
        record(model, fail, batch)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert all(p.grad is not None and bool(p.grad.eq(1).all()) for p in before.values())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_preflight_leaves_random_state_modes_and_parameters_alone() -> None:
    model, batch = tiny("gpt2", "causal_lm", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2), text_batch("causal_lm")
    model.transformer.h[0].eval()
    state, values = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    preflight(model, per_example_losses, batch)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_norm_and_sum_come_from_the_same_dropout_mask(checkpointing: bool | None) -> None:
    model, batch = tiny("gpt2", "causal_lm", resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3), text_batch("causal_lm")
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    torch.manual_seed(5)
    found = record(model, per_example_losses, batch)
    torch.manual_seed(5)
    per_example_losses(model, batch).sum().backward()
    sums = found.weighted_sum(torch.ones(3))
    assert all(torch.allclose(sums[name], p.grad, rtol=1e-10, atol=1e-13) for name, p in model.named_parameters())
    one = [found.weighted_sum(torch.eye(3, dtype=torch.float64)[i]) for i in range(3)]
    norms = torch.stack([sum(v.square().sum() for v in g.values()) for g in one])
    assert torch.allclose(norms, found.squared_norms(), rtol=1e-10)


@pytest.mark.slow
def test_it_needs_no_gradients_switched_on() -> None:
    model, batch = nn.Linear(3, 2), {"x": torch.randn(4, 3)}

    def losses(model: Any, batch: Any) -> Tensor:
        return model(batch["x"]).square().sum(1)

    expected = record(model, losses, batch).weighted_sum(torch.ones(4))
    with torch.no_grad():
        found = record(model, losses, batch, certificate=preflight(model, losses, batch)).weighted_sum(torch.ones(4))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_nothing_accumulates_over_recordings() -> None:
    import gc

    model, batch = tiny("llama_tied", "causal_lm"), text_batch("causal_lm")

    def tensors() -> int:
        return sum(isinstance(o, Tensor) for o in gc.get_objects())

    record(model, per_example_losses, batch).squared_norms()
    gc.collect()
    before = tensors()
    gc.disable()
    try:
        for _ in range(20):
            record(model, per_example_losses, batch).squared_norms()
        assert tensors() <= before + 5, "reference cycles hold on to activations"
    finally:
        gc.enable()


def test_saving_and_loading_within_training_is_not_disturbed(tmp_path: Path) -> None:
    model, batch = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    record(model, per_example_losses, batch)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    assert again.lm_head.weight is again.transformer.wte.weight


def test_a_model_that_fails_by_itself_fails_as_it_does():
    model = tiny("gpt2", "causal_lm", torch.float32)

    def loss(model: Any, batch: Any) -> Tensor:
        return model(input_ids=batch["input_ids"]).logits @ torch.zeros(5, 5)

    with pytest.raises(RuntimeError, match="mat"):
        record(model, loss, text_batch("causal_lm"))
