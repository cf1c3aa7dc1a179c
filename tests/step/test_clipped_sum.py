"""The clipped sum over micro-batches: what is added, what is counted, what is left out."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.accounting import FlatClipping
from hf_dp.clipping.flat import Flat
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.per_example import loop, record
from hf_dp.per_example.batch import Batch, take
from hf_dp.randomness import Entropy
from hf_dp.step.clipped_sum import ClippedSum


class Tied(nn.Module):
    """A lookup and a projection with one matrix, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(torch.tanh(self.table(ids))))
        return logits


def losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["ids"])
    per_position = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return per_position.view(len(logits), -1).mean(1) * batch["scale"]


def batch_of(size: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 11, (size, 4), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels, "scale": torch.linspace(0.1, 3.0, size, dtype=dtype)}


def clipped(model: nn.Module, batches: list[dict[str, Tensor]], norm: float) -> ClippedSum:
    total = ClippedSum(model, Flat(FlatClipping(norm=norm)))
    for batch in batches:
        total.add(record(model, losses, batch))
    return total


def test_the_sum_of_clipped_gradients() -> None:
    model, batch = Tied().double(), batch_of(7)
    total = clipped(model, [batch], 0.5)
    truth = loop(model, losses, batch)
    weights = (0.5 / truth.squared_norms().sqrt()).clamp(max=1)
    for name, expected in truth.weighted_sum(weights).items():
        assert torch.allclose(total.gradients[name], expected, rtol=1e-10)
    assert list(total.gradients) == ["table.weight", "norm.weight", "norm.bias", "head.bias"]
    assert total.examples == 7
    assert total.clipped == int((weights < 1).sum())
    assert 0 < total.clipped < 7
    assert total.non_finite == 0
    assert total.sensitivity == 0.5
    assert math.isclose(total.loss, float(truth.losses.sum()))


@pytest.mark.parametrize("split", [[7], [1] * 7, [3, 4], [6, 1]])
def test_micro_batches_do_not_matter(split: list[int]) -> None:
    model, batch = Tied().double(), batch_of(7)
    index = torch.arange(7).split(split)
    whole, parts = clipped(model, [batch], 0.5), clipped(model, [take(batch, i.tolist()) for i in index], 0.5)
    assert all(torch.allclose(parts.gradients[name], v, rtol=1e-12) for name, v in whole.gradients.items())
    assert (parts.examples, parts.clipped) == (whole.examples, whole.clipped)


def test_an_empty_batch_is_a_sum_of_zero() -> None:
    total = clipped(Tied(), [], 1.0)
    assert total.examples == total.clipped == 0
    assert all(not bool(v.any()) and v.dtype == torch.float32 for v in total.gradients.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_failure_14_an_example_that_is_not_finite_contributes_zero(bad: float) -> None:
    """Zero by selection, never 0 x NaN; and not one bit of its neighbours moves."""
    model, batch = Tied(), batch_of(5, torch.float32)
    batch["scale"][2] = 0.0
    without = clipped(model, [batch], 0.5)
    batch["scale"][2] = bad
    found = clipped(model, [batch], 0.5)
    assert found.non_finite == 1
    assert found.examples == 5
    others = clipped(model, [take(batch, [0, 1, 3, 4])], 0.5)
    for name, total in found.gradients.items():
        assert total.isfinite().all()
        assert torch.allclose(total, without.gradients[name], rtol=1e-6, atol=1e-7)
        assert torch.allclose(total, others.gradients[name], rtol=1e-6, atol=1e-7)
    assert math.isclose(found.loss, without.loss, rel_tol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_failure_14_where_nothing_is_read_in_between(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = Tied(), [batch_of(5, torch.float32), batch_of(3, torch.float32)]
    batches[0]["scale"][2] = bad
    expected = clipped(model, batches, 0.5)
    monkeypatch.setattr("hf_dp.per_example.waiting._AT_ONCE", frozenset())
    found = clipped(model, batches, 0.5)
    for name, total in found.gradients.items():
        assert torch.allclose(total, expected.gradients[name], rtol=1e-6, atol=1e-7)
    assert found.non_finite == 1
    assert (found.examples, found.clipped, found.loss) == (expected.examples, expected.clipped, expected.loss)


def test_failure_14_neighbours_of_nan_keep_every_bit() -> None:
    model, batch = Tied(), batch_of(5, torch.float32)
    other = {**batch, "scale": batch["scale"].clone()}
    batch["scale"][2], other["scale"][2] = math.nan, math.inf
    found, again = clipped(model, [batch], 0.5), clipped(model, [other], 0.5)
    assert all(torch.equal(v, again.gradients[name]) for name, v in found.gradients.items())


def test_failure_15_small_contributions_are_not_swallowed_by_a_bf16_sum() -> None:
    model = Tied().bfloat16()
    total = ClippedSum(model, Flat(FlatClipping(norm=1.0)))
    batch = batch_of(1, torch.float32)
    batch["scale"] = torch.tensor([1e-3])
    found = record(model, losses, batch)
    for _ in range(1000):
        total.add(found)
    one = found.weighted_sum(torch.ones(1))
    for name, value in total.gradients.items():
        assert value.dtype == torch.float32
        assert torch.allclose(value, 1000 * one[name], rtol=1e-3, atol=1e-6)


def test_parameters_laid_out_otherwise_are_summed_right() -> None:
    """channels_last weights and a transposed parameter: factors are row by row, the parameter is not."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 2, stride=2).to(memory_format=torch.channels_last)
            self.weight = nn.Parameter(torch.randn(4, 5).T)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(torch.tanh(self.conv(x)).flatten(2).mT, self.weight)

    model = Patches().double()
    batch = {"x": torch.randn(5, 3, 6, 6, dtype=torch.float64)}
    assert not model.weight.is_contiguous()

    def square(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch["x"]).square().flatten(1).mean(1)
        return loss

    total, truth = ClippedSum(model, Flat(FlatClipping(norm=math.inf))), loop(model, square, batch)
    total.add(record(model, square, batch))
    for name, expected in truth.weighted_sum(torch.ones(5)).items():
        assert torch.allclose(total.gradients[name], expected, rtol=1e-12)
        assert total.gradients[name].shape == dict(model.named_parameters())[name].shape


@pytest.mark.parametrize(("largest", "buffers"), [(1 << 24, 1), (100, 3), (1, 6)])
def test_noise_is_asked_for_once_for_all_parameters_and_every_number_of_them_gets_its_own(
    largest: int, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_dp.step.clipped_sum._LARGEST", largest)
    asked: list[list[Tensor]] = []

    class Noted(GaussianNoise):
        def add_(self, tensors: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
            asked.append(list(tensors))
            super().add_(asked[-1], *args, **kwargs)

    model = nn.ModuleList([nn.Linear(3, 5), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.Linear(5, 1)])
    total = ClippedSum(model, Flat(FlatClipping(norm=1.0)))
    total.release(Noted(Entropy(3)), 2.0, 0)
    assert [len(tensors) for tensors in asked] == [buffers]
    numbers = torch.cat([gradient.flatten() for gradient in total.gradients.values()])
    assert len(numbers.unique()) == len(numbers) == sum(p.numel() for p in model.parameters())
    assert 1 < float(numbers.std()) < 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_weights_in_16_bits_go_when_their_gradients_are_made(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer after the other, so that no two copies of all are there; in float32 a sum becomes the gradient."""
    monkeypatch.setattr("hf_dp.step.clipped_sum._LARGEST", 1)
    model = Tied().to(dtype)
    total = ClippedSum(model, Flat(FlatClipping(norm=1.0)))
    batch = batch_of(5, torch.float32)
    total.add(record(model, losses, batch))
    total.release(GaussianNoise(Entropy(3)), 2.0, 0)
    expected = {name: gradient / 4 for name, gradient in total.gradients.items()}
    buffers = [weakref.ref(gradient.untyped_storage()) for gradient in total.gradients.values()]
    places = {name: gradient.data_ptr() for name, gradient in total.gradients.items()}
    left: list[int] = []
    monkeypatch.setattr(
        "hf_dp.step.clipped_sum.like", lambda mean, p: left.append(sum(one() is not None for one in buffers)) or mean
    )
    total.set_gradients(4.0)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, expected[name].to(dtype))
        assert (p.grad.data_ptr() == places[name]) == (dtype == torch.float32)
    assert left == ([3, 2, 1, 0] if dtype == torch.bfloat16 else [4, 4, 4, 4])
