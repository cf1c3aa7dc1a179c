"""Batch norms that are kept still are exact, and are copied, saved and loaded like others."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_dp import still_batch_norm
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import relative_error
from tests.training.own_loops import a_run
from tests.training.workbench import private


class Convolutions(nn.Module):
    def __init__(self, statistics: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=statistics), nn.ReLU())
        self.out = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        with torch.no_grad():
            for name, value in self.named_buffers():
                if name.endswith(("mean", "var")):
                    value.add_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).mean((2, 3)))  # type: ignore[no-any-return]


def losses(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def data(size: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {"x": torch.randn(size, 1, 7, 7, generator=generator).to(dtype), "labels": torch.arange(size) % 3}


def test_their_weights_train_exactly_and_their_statistics_stay() -> None:
    model = Convolutions().double()
    with pytest.raises(UnsupportedModelError, match="batch normalisation") as refused:
        preflight(model.train(), losses, data(4))
    assert "hf_dp.still_batch_norm(model)" in refused.value.fix
    before = {name: value.clone() for name, value in model.named_buffers()}
    assert still_batch_norm(model) == ["first.1", "out.1"]
    certificate = preflight(model.train(), losses, data(4))
    for size in (1, 3, 7):
        found = record(model, losses, data(size), certificate=certificate)
        assert {"first.1.weight", "out.1.bias"} <= found.factors.keys()
        assert relative_error(found, loop(model, losses, data(size))) <= 1e-12
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    assert {type(module) for module in model.modules() if not module.training} == {nn.BatchNorm1d, nn.BatchNorm2d}


class Positions(Convolutions):
    """Each place of a picture is a position then, as where attention follows: its channels come first in memory."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.first[1](self.first[0](x))
        return self.out(made.view(len(x), 4, -1).permute(0, 2, 1).cos().cumsum(1)[:, -1])  # type: ignore[no-any-return]


def test_one_example_whose_gradient_has_its_channels_last() -> None:
    """torch's batch norm in eval mode gave a gradient of other numbers then, of one example by itself alone."""
    model = Positions().double()
    still_batch_norm(model)
    model.train()
    certificate = preflight(model, losses, data(4))
    assert relative_error(record(model, losses, data(4)), loop(model, losses, data(4))) <= 1e-12
    weight, one = model.first[0].weight, {name: value[:1] for name, value in data(4).items()}
    found = record(model, losses, one, certificate=certificate).weighted_sum(torch.ones(1))["first.0.weight"]
    step = 1e-6 * torch.randn_like(weight)
    with torch.no_grad():
        above, below = (losses(_moved(model, sign * step), one).sum() for sign in (1, -1))
    assert torch.isclose((above - below) / 2, (found * step).sum(), rtol=1e-4)


def laid_out(values: Tensor, order: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The same numbers in another order in memory; of an axis of length 1 torch lets the stride be anything."""
    moved = values.permute(order).contiguous().permute([order.index(axis) for axis in range(values.dim())])
    kept = zip(moved.shape, moved.stride(), strides, strict=True)
    return moved.as_strided(moved.shape, [other if size == 1 else stride for size, stride, other in kept])


LAST, FIRST = ((0, 2, 3, 1), (1, 1, 1, 12)), ((0, 1, 2, 3), (1, 1, 4, 4))


@pytest.mark.parametrize("shape", [(2, 4, 3, 1), (2, 4, 1, 3), (1, 4, 3, 1), (1, 4, 3, 3)], ids=str)
@pytest.mark.parametrize(("of_input", "of_gradient"), [(LAST, FIRST), (FIRST, LAST)], ids=["input", "gradient"])
def test_pictures_of_one_column_whose_channels_may_come_first_or_last(
    shape: Any, of_input: Any, of_gradient: Any
) -> None:
    """torch's batch norm in eval mode takes one for the other."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4).double()
    assert norm.running_var is not None
    norm.running_var.uniform_(0.5, 2)
    still_batch_norm(norm)
    given = laid_out(torch.randn(shape).double(), *of_input).requires_grad_()
    gradient = laid_out(torch.randn(shape).double(), *of_gradient)
    found = torch.autograd.grad(norm(given), [given, norm.weight, norm.bias], gradient)
    scale = (norm.running_var + norm.eps).rsqrt().view(-1, 1, 1)
    by_hand = (given * scale) * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    for one, other in zip(found, torch.autograd.grad(by_hand, [given, norm.weight, norm.bias], gradient), strict=True):
        torch.testing.assert_close(one, other)


def _moved(model: Positions, step: Tensor) -> Positions:
    moved = copy.deepcopy(model)
    moved.first[0].weight += step
    return moved


def test_one_without_statistics_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"first\.1 has no statistics to keep"):
        still_batch_norm(Convolutions(statistics=False))


def test_copies_and_what_is_pickled_stay_still_by_themselves() -> None:
    model = Convolutions()
    still_batch_norm(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.train()
        assert not other.first[1].training
        model.first[1].training = True
        other.first[1].train()
        assert model.first[1].training
        model.first[1].training = False


def test_a_private_run_of_one(tmp_path: Path) -> None:
    model = Convolutions()
    still_batch_norm(model)
    rows = [{"x": x, "labels": int(y)} for x, y in zip(*data(48, torch.float32).values(), strict=True)]

    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([r["x"] for r in rows]), "labels": torch.tensor([r["labels"] for r in rows])}

    run = a_run(model, private(), dataset=rows, collate=collate, steps=2, loss=losses)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.first[1].weight.detach().clone()
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert not torch.equal(model.first[1].weight, before)
    run.save(tmp_path / "saved")
