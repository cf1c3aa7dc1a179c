"""Sparse tensors among what a model holds: compared by their parts, whatever they are held as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp import PrivacyConfig, PrivateRun
from hf_dp.errors import HfDpError
from hf_dp.per_example.checks.independence import close
from hf_dp.per_example.checks.observed import observer
from hf_dp.per_example.checks.values import equal, far
from hf_dp.per_example.rule import Axis

LAYOUTS = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "bsc": lambda t: t.to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_equal_where_places_and_values_are(layout: str) -> None:
    make: Any = LAYOUTS[layout]
    one, places = torch.eye(4), torch.eye(4).flip(0)
    assert equal(make(one), make(one))
    assert equal(make(one * torch.nan), make(one * torch.nan))
    assert not equal(make(one), make(2 * one))
    assert not equal(make(one), make(places))
    assert not equal(make(one), one)
    assert not equal(make(one), make(one + places))
    for held in (one, torch.zeros(4, 4)):
        changed = far(make(held), None)
        assert changed.layout == make(held).layout
        assert bool(changed.to_dense().ne(held).all())


class Graph(nn.Module):
    """Layers between which neighbours in a graph are added up."""

    def __init__(self, held: str, layout: str, of: str) -> None:
        super().__init__()
        self.of, neighbours = of, LAYOUTS[layout](torch.eye(4) + torch.eye(4).flip(0))
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        if held == "attribute":
            self.neighbours = neighbours
        else:
            self.register_buffer("neighbours", neighbours, persistent=held == "saved")

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "weights":
            return x @ torch.sparse.mm(self.neighbours, self.weight)
        return (self.neighbours @ x.reshape(-1, 4).T).T.reshape(x.shape) @ self.weight


def a_run(model: nn.Module) -> PrivateRun:
    numbers = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(3, 4, generator=numbers)} for _ in range(12)]
    return PrivateRun(
        model, rows, PrivacyConfig(noise_multiplier=1.0, target_delta=1e-5, seed=7),
        lambda few: {"x": torch.stack([row["x"] for row in few])}, expected_batch_size=4, micro_batch_size=4, steps=2,
        loss=lambda model, batch: model(batch["x"]).square().flatten(1).sum(1),
    )  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("of", ["data", "weights"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("held", ["attribute", "saved", "not saved"])
def test_a_model_that_holds_one_trains(held: str, layout: str, of: str) -> None:
    model = Graph(held, layout, of)
    run = a_run(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    before = model.weight.detach().clone()
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert run.ledger.steps == 2
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("by", [1e-9, 1.0])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("held", ["attribute", "saved", "not saved"])
def test_one_that_keeps_what_it_has_seen_is_refused(held: str, layout: str, by: float) -> None:
    class Keeping(Graph):
        def forward(self, x: Tensor) -> Tensor:
            self.neighbours = LAYOUTS[layout](self.neighbours.to_dense() + by * x.detach().sum())
            return super().forward(x)

    model = Keeping(held, layout, "data")
    with pytest.raises(HfDpError, match="keep|saved|neighbours"):
        a_run(model).begin(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_are_close_where_places_are_the_same(layout: str) -> None:
    make: Any = LAYOUTS[layout]
    one = torch.eye(4)
    assert close(make(one), make(one + 1e-9 * one))
    assert not close(make(one), make(1.1 * one))
    assert not close(make(one), make(one + one.flip(0)))
    assert not close(make(one), one)


def test_what_all_examples_are_given_is_one_row_of_places_and_values() -> None:
    one, rows_of = torch.eye(4), observer(torch.nn.Module())
    rows = [rows_of(one.to_sparse(), Axis(3, "constant")), rows_of(one.flip(0).to_sparse(), Axis(3, "constant"))]
    assert {len(row) for row in rows} == {1}
    assert not torch.equal(*rows)
    assert rows_of(torch.ones(3, 2, 2).to_sparse(), Axis(3, "batch")).shape == (3, 4)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits_are_compared_where_they_lie_in_one_place_too(dtype: torch.dtype) -> None:
    one = torch.ones(3).to(dtype)
    assert equal(one, one)
    assert equal(one.view(3), one)
    assert equal(one.clone(), one)
    assert not equal(torch.zeros(3).to(dtype), one)
    assert not equal(torch.ones(3), torch.full((3,), 2.0).to(dtype))
