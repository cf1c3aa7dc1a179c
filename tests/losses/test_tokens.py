"""The cross-entropy of many tokens: torch's values and gradients, with fewer logits kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import tokens as tokenwise
from hf_dp.per_example import record


def tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(4, 6, 11, generator=generator, dtype=dtype)
    labels = torch.randint(0, 11, (4, 6), generator=generator)
    return logits, labels.masked_fill(torch.rand(4, 6, generator=generator) < 0.3, -100).index_fill(
        0, torch.tensor(2), -100
    )


PRODUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, torch.eye(11, dtype=x.dtype)),
    "tanh, which keeps its output": torch.tanh,
    "capped": lambda x: 3 * torch.tanh(x / 3),
    "a leaf": lambda x: x,
    "a view of what tanh keeps": lambda x: torch.tanh(x)[:, 1:],
    "a cast": lambda x: x.to(torch.float32).to(x.dtype),
}


@pytest.mark.parametrize("chunk", [1, 25, 10**6])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_values_and_gradients_are_those_of_torch(
    producer: str, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenwise, "_CHUNK", chunk)
    x, labels = tokens()
    found, gradients = [], []
    for ours in (True, False):
        leaf = x.clone().requires_grad_()
        logits = PRODUCERS[producer](leaf)
        few = labels[:, -logits.shape[1] :]
        kept = logits.detach().clone()
        if ours:
            loss = tokenwise.token_losses(logits, few, smoothing)
        else:
            each = F.cross_entropy(logits.mT, few, reduction="none", label_smoothing=smoothing)
            loss = each.sum(1) / few.ne(-100).sum(1).clamp_min(1)
        loss.square().sum().backward()
        found.append(loss.detach())
        gradients.append(leaf.grad)
        if producer in ("a leaf", "tanh, which keeps its output"):
            assert torch.equal(logits, kept)
    assert torch.allclose(*found, rtol=1e-12)
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-14)
    assert found[0][2] == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_16_bits_are_computed_with_in_float32_and_not_copied(
    dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenwise, "_CHUNK", 25)
    x, labels = tokens(dtype)
    leaf, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    with _Largest() as largest:
        loss = tokenwise.token_losses(F.linear(leaf, torch.eye(11, dtype=dtype)), labels, smoothing)
        loss.square().sum().backward()
    each = F.cross_entropy(expected.float().mT, labels, reduction="none", label_smoothing=smoothing)
    wanted = each.sum(1) / labels.ne(-100).sum(1).clamp_min(1)
    wanted.square().sum().backward()
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, wanted, rtol=1e-5)
    # The last rounding, to 16 bits, may fall to either side.
    assert torch.allclose(leaf.grad.float(), expected.grad.float(), rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert largest.numbers <= 25 < x.numel()


class _Largest(TorchDispatchMode):
    """How many float32 numbers an operation made at most."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and t.dtype == torch.float32]
        self.numbers = max([self.numbers, *made])
        return result


def test_no_gradient_of_the_gradient_is_promised() -> None:
    x, labels = tokens()
    leaf = x.requires_grad_()
    loss = tokenwise.token_losses(F.linear(leaf, torch.eye(11, dtype=x.dtype)), labels, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="twice|once|does not require grad"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_example_whose_logits_are_not_finite_leaves_the_others_alone(value: float) -> None:
    x, labels = tokens()
    x[0, :, 3] = value
    leaf = x.requires_grad_()
    loss = tokenwise.token_losses(F.linear(leaf, torch.eye(11, dtype=x.dtype)), labels, 0.0)
    loss.sum().backward()
    assert not loss[0].isfinite()
    assert loss[1:].isfinite().all()
    assert leaf.grad[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_a_hook_has_kept_for_a_penalty_are_not_overwritten(dtype: torch.dtype) -> None:
    """Of what hooks have packed autograd does not see whether it was changed."""
    gradients = []
    for packed in (torch.clone, torch.detach):
        x, labels = tokens(dtype)
        leaf = x.requires_grad_()
        logits = F.linear(leaf, torch.eye(11, dtype=dtype))
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda kept: kept):
            penalty = logits.square().sum()
        (tokenwise.token_losses(logits, labels, 0.0).sum() + penalty).backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_logits_of_a_recorded_head_are_known_not_to_be_kept() -> None:
    """By the name that autograd gives a recorded use: without it there would be a copy of the logits in memory."""
    seen: list[str] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        seen.append(type(logits.grad_fn).__name__)
        return tokenwise.token_losses(logits, batch["y"], 0.0)

    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(3, 4, 5, generator=generator), "y": torch.randint(7, (3, 4), generator=generator)}
    record(nn.Linear(5, 7), loss, batch)
    assert set(seen) <= set(tokenwise._DOES_NOT_KEEP_ITS_OUTPUT)


def test_labels_of_texts_for_a_model_of_tokens_are_told_which_model_they_ask_for() -> None:
    with pytest.raises(UnsupportedModelError, match=r"logits .2, 4, 3. for labels .2,.") as caught:
        tokenwise.token_sums(torch.zeros(2, 4, 3), torch.tensor([0, 1]))
    assert "sequence classification" in caught.value.fix
