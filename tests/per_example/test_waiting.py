"""Where nothing is read between micro-batches, examples are left out by zeros, and looked-up rows are united later."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import Dense, OneHot, Outer, PerExampleGradients, RowSum, record
from hf_dp.per_example.chosen import Chosen
from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.norms import NormsOfDropped, all_squared_norms
from hf_dp.per_example.sums import adding

SIZES = (7, 4)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on the CPU is taken for a device whose answers have to be waited for."""
    return lambda: monkeypatch.setattr("hf_dp.per_example.waiting._AT_ONCE", frozenset())


def uses() -> dict[str, Factors]:
    torch.manual_seed(0)
    dense, ids = lambda n: Dense(torch.randn(3, 5, n)), OneHot(torch.randint(0, 7, (3, 5)), 7)
    return {
        "dense": Outer(dense(7), dense(4), 2.0),
        "looked up": Outer(ids, dense(4)),
        "transposed": Outer(dense(4), ids).transposed,
        "instantiated": PerExample(torch.randn(3, *SIZES)),
    }


def with_second(use: Factors, value: float) -> Factors:
    def poisoned(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            tensor = tensor.clone()
            tensor[1].view(-1)[::3] = value
        return tensor

    if isinstance(use, PerExample):
        return PerExample(poisoned(use.values))
    return Outer(use.left.of(poisoned(use.left.tensor)), use.right.of(poisoned(use.right.tensor)), use.scale)


def summed(use: Factors) -> Tensor:
    gradients = PerExampleGradients(torch.zeros(3), {"w": [use]}, {"w": nn.Parameter(torch.zeros(SIZES))})
    return gradients.weighted_sum(torch.tensor([0.5, 0.0, 1.5]))["w"]


@pytest.mark.parametrize("by_index", [True, False])
@pytest.mark.parametrize("kind", uses())
def test_an_example_that_is_left_out_leaves_nothing_behind(
    kind: str, by_index: bool, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    selected = summed(uses()[kind])
    elsewhere()
    monkeypatch.setattr("hf_dp.per_example.chosen._BY_INDEX", {"cpu"} if by_index else set())
    for value in (0.0, 1e38, math.inf, math.nan):
        assert torch.allclose(summed(with_second(uses()[kind], value)), selected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(selected, torch.zeros(SIZES))


@pytest.mark.parametrize("mask", [(True,) * 4, (False,) * 4, (False, True, False, True), (True, False, False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("at_once", [3, 36, 1 << 26])
def test_the_sum_of_those_that_are_chosen(
    at_once: int, mask: tuple[bool, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By index: of some, of none and of all, added to what there is, again and of other gradients too."""
    monkeypatch.setattr("hf_dp.per_example.chosen._BY_INDEX", {"cpu"})
    monkeypatch.setattr("hf_dp.per_example.chosen.WEIGHTED_AT_ONCE", at_once)
    torch.manual_seed(0)
    weights = torch.rand(4).mul_(torch.tensor(mask)).to(dtype)
    chosen = Chosen(weights)
    for size in (6, 40):
        values = torch.randn(4, size, dtype=dtype)
        expected = torch.full((size,), 2.0, dtype=dtype) + 2 * (weights[:, None] * values).sum(0)
        values[~torch.tensor(mask)] = math.nan
        out = torch.full((size,), 2.0, dtype=dtype)
        for _ in range(2):
            PerExample(values).masked(chosen).add_weighted_(out, weights)
        assert torch.allclose(out, expected, rtol=1e-5)


@pytest.mark.parametrize("by_index", [True, False])
@pytest.mark.parametrize("length", [4, 70])
def test_the_sum_is_in_float32_under_autocast_too(
    length: int, by_index: bool, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes finish it outside of what takes norms."""
    elsewhere()
    monkeypatch.setattr("hf_dp.per_example.chosen._BY_INDEX", {"cpu"} if by_index else set())
    torch.manual_seed(0)
    weights, rows, out = torch.rand(length), torch.randn(length, 40), {"w": torch.zeros(40)}
    expected = (weights.double() @ rows.double()).float()
    with torch.autocast("cpu", torch.bfloat16), adding(out, weights, lambda name: torch.zeros(40)) as add:
        add("w", [PerExample(rows)])
    assert torch.allclose(out["w"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [5, 64, 70])
@pytest.mark.parametrize("size", [1, 33, 70_000, 3_000_000])
def test_on_a_gpu_too_and_the_same_each_time(size: int, length: int) -> None:
    torch.manual_seed(0)
    weights, rows = torch.rand(length), torch.randn(length, size)
    weights[1] = weights[3] = 0
    expected = weights.double() @ rows.double()
    # Of each addition in float32, at most.
    rounding = length * 2.0**-24 * (weights.double() @ rows.double().abs())
    rows[1], rows[3] = math.nan, math.inf
    found = []
    for is_deterministic in (False, True, True):
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(is_deterministic)
        try:
            found += [Chosen(weights.cuda()).weighted(rows.cuda()).cpu() for _ in range(10)]
        finally:
            torch.use_deterministic_algorithms(before)
    assert all(torch.equal(one, found[0]) for one in found), "not the same each time"
    assert bool(((found[0].double() - expected).abs() <= rounding).all())


@pytest.mark.parametrize("at_once", [0, 100, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_gradients_are_summed_together(
    dtype: torch.dtype, at_once: int, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one parameter that is used twice too, and beside large ones and others laid out in columns."""
    elsewhere()
    monkeypatch.setattr("hf_dp.per_example.chosen._BY_INDEX", {"cpu"})
    monkeypatch.setattr("hf_dp.per_example.chosen.SUMMED_AT_ONCE", at_once)
    monkeypatch.setattr("hf_dp.per_example.chosen.SMALL", 30)
    torch.manual_seed(0)
    shapes = {"a": (5,), "b": (4, 7), "twice": (3, 2), "large": (6, 6), "columns": (2, 3, 2, 2), "number": ()}
    values = {name: [torch.randn(3, *shape, dtype=dtype)] for name, shape in shapes.items()}
    values["twice"].append(torch.randn(3, 3, 2, dtype=dtype))
    parameters = {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}
    parameters["columns"].data = parameters["columns"].data.to(memory_format=torch.channels_last)
    weights = torch.tensor([0.5, 0.0, 1.5])
    expected = {n: sum(torch.tensordot(weights.to(dtype), one, 1) for one in several) for n, several in values.items()}
    for one in values["twice"]:
        one[1] = math.nan
    values["b"][0][1] = math.inf
    factors: dict[str, list[Factors]] = {name: [PerExample(v) for v in several] for name, several in values.items()}
    with Calls() as calls:
        found = PerExampleGradients(torch.zeros(3), factors, parameters).weighted_sum(weights)
    for name, total in expected.items():
        assert torch.allclose(found[name], total, rtol=1e-6), name
    # Seven uses: a, b, the first of twice; number, the second of twice; large; columns. a and b are 99 numbers.
    assert calls.names["mm"] == {0: 7, 100: 5, 1 << 24: 4}[at_once]


def test_what_waits_to_be_summed_is_not_changed_meanwhile(
    elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule may hand on the very gradient that autograd goes on with; of two passes norms are those of before."""
    elsewhere()
    monkeypatch.setattr("hf_dp.per_example.chosen._BY_INDEX", {"cpu"})
    out, weights, values = {"w": torch.zeros(4)}, torch.tensor([0.5, 0.0, 1.5]), torch.randn(3, 4)
    with ExitStack() as stack:
        stack.enter_context(adding(out, weights, lambda name: torch.zeros(4)))("w", [PerExample(values)])
        values.mul_(100)
        with pytest.raises(UnsupportedModelError, match="changed in place"):
            stack.close()
    assert not out["w"].any()


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_what_is_dropped_are_those_of_what_is_kept(
    dtype: torch.dtype, is_elsewhere: bool, elsewhere: Callable[[], None]
) -> None:
    """Squares and bounds, of uses that are alike and others, and of a parameter that is used twice."""
    torch.manual_seed(0)

    def outer(positions: int, p: int, d: int, scale: float = 1.0) -> Outer:
        return Outer(*(Dense(torch.randn(3, positions, n, dtype=dtype)) for n in (p, d)), scale)

    lookup = Outer(OneHot(torch.randint(0, 40, (3, 5)), 40), Dense(torch.randn(3, 5, 4, dtype=dtype)))
    several: list[list[Factors]] = [
        [outer(5, 6, 7)], [outer(5, 6, 7, -2.0)], [outer(5, 6, 7)], [outer(4, 6, 7)], [lookup],
        [lookup, outer(5, 40, 4)], [outer(9, 3, 2).settled()], [outer(9, 3, 2).settled()],
        [PerExample(torch.randn(3, 1100, dtype=dtype))], [PerExample.over(torch.randn(3, 4, 700, dtype=dtype))],
    ]  # fmt: skip
    if is_elsewhere:
        elsewhere()
    norms = NormsOfDropped()
    for uses in several:
        norms.add(uses)
    assert len(norms.pairs()) < len(several) or not is_elsewhere
    for i in (0, 1):
        found, kept = (
            torch.stack([pair[i] for pair in pairs]) for pairs in (norms.pairs(), all_squared_norms(several))
        )
        assert torch.allclose(found.sum(0), kept.sum(0), rtol=1e-5)


class Calls(TorchDispatchMode):
    """How often each operation was called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("most", [0, 20, 1 << 25])
def test_rows_are_united_when_all_are_in_or_there_are_many(
    most: int, elsewhere: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    several = [Outer(OneHot(torch.randint(0, 40, (3, 5)), 40), Dense(torch.randn(3, 5, 4))) for _ in range(3)]

    def total() -> tuple[Tensor, Tensor]:
        rows = RowSum("table", torch.zeros(40, 4))
        for use in several:
            rows.add_(use, torch.tensor([0.5, 0.0, 1.5]))
        subtracted = RowSum("table", torch.zeros(40, 4))
        subtracted.add_(several[0], torch.ones(3))
        rows.sub_(subtracted)
        assert torch.equal(rows.coalesced()[0], rows.coalesced()[0].unique())
        return rows.coalesced()[0], rows.of(torch.arange(40))

    ids, expected = total()
    elsewhere()
    monkeypatch.setattr("hf_dp.per_example.rows._WAITING", most)
    assert torch.equal(total()[0], ids)
    assert torch.allclose(total()[1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("of_model", [False, True])
def test_ids_that_are_refilled_in_place_move_no_gradient(of_model: bool, elsewhere: Callable[[], None]) -> None:
    """As of a static buffer for the micro-batches, of the loader or in the model."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3)
            self.register_buffer("ids", torch.zeros(16, 4, dtype=torch.int64))

        def forward(self, ids: Tensor) -> Tensor:
            if of_model:
                ids = self.ids[: len(ids)].copy_(ids)
            return self.table(ids).square().sum((1, 2))

    elsewhere()
    torch.manual_seed(0)
    model, static = Looked(), torch.zeros(2, 4, dtype=torch.int64)
    rows = RowSum("table.weight", model.table.weight)
    for ids, share in ((torch.arange(1, 9).view(2, 4), 1.0), (torch.zeros(2, 4, dtype=torch.int64), 0.0)):
        static.copy_(ids)
        made = record(model, lambda model, batch: model(batch["ids"]), {"ids": static}, tables=["table.weight"])
        first = torch.tensor([share, 0.0]) / made.squared_norms().sqrt()
        made.add_weighted_sum_({}, first, {"table.weight": rows})
    found = rows.of(torch.arange(10)).norm(dim=1)
    assert bool((found[1:5] > 0).all())
    assert not found[[0, 5, 6, 7, 8, 9]].any()
    assert float(found.norm()) <= 1 + 1e-6
