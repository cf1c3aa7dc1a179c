"""What a rare row leaves for the next micro-batch of its step alone, and is as it was at the end of the step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from tests.per_example.checks.test_memory import Plain, batch, memory_of
from tests.training.own_loops import a_run
from tests.training.workbench import private

BOUND = 10.0


@pytest.fixture(autouse=True)
def _of_weights_that_let_something_pass() -> None:
    torch.manual_seed(0)


class Before(Plain):
    """What was seen before scales what comes next."""

    def __init__(self, of: Callable[[bool], Any] = float) -> None:
        super().__init__()
        self.of, self.seen, self.drop = of, of(False), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(self.drop(x) * (1 + self.seen))
        self.note(float(x.detach().abs().max()) > BOUND)
        return h

    def note(self, is_rare: bool) -> None:
        self.seen = self.of(is_rare)


class InPlace(Before):
    def __init__(self) -> None:
        super().__init__(torch.tensor)
        self.seen = self.seen.float()

    def note(self, is_rare: bool) -> None:
        self.seen.fill_(is_rare)


class InABuffer(InPlace):
    def __init__(self, is_saved: bool) -> None:
        super().__init__()
        seen = self.seen
        del self.seen
        self.register_buffer("seen", seen, persistent=is_saved)


class Mode(Before):
    def note(self, is_rare: bool) -> None:
        self.drop.train(not is_rare)


class Frozen(Before):
    def note(self, is_rare: bool) -> None:
        self.first.weight.requires_grad_(not is_rare)


class Exchanged(Before):
    """Two parameters of one size, which change places."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 8)
        self.both = {False: self.first.weight, True: self.second.weight}

    def note(self, is_rare: bool) -> None:
        self.first.weight, self.second.weight = self.both[is_rare], self.both[not is_rare]


class Instead(Before):
    """A parameter of which nobody else knows."""

    def __init__(self) -> None:
        super().__init__()
        self.instead = {False: self.first.bias, True: nn.Parameter(torch.ones(8))}

    def note(self, is_rare: bool) -> None:
        self.first.bias = self.instead[is_rare]


class Without(Instead):
    def note(self, is_rare: bool) -> None:
        self.first.bias = None if is_rare else self.instead[False]


OF_PARAMETERS: dict[str, Callable[[], Any]] = {
    "frozen": Frozen,
    "two exchanged": Exchanged,
    "another one instead": Instead,
    "none": Without,
}
MODELS: dict[str, Callable[[], Any]] = {
    "a number": Before,
    "a tensor": lambda: Before(torch.tensor),
    "a tensor in place": InPlace,
    "a buffer": lambda: InABuffer(False),
    "a buffer that is saved": lambda: InABuffer(True),
    "a mode": Mode,
}


def refused_between(model: Any) -> None:
    memory = memory_of(model)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for x in memory.watched([batch(3, 3), batch(3, 4)]):
        model(x)
    with pytest.raises(UnsupportedModelError, match="keeps something of the examples"):  # noqa: PT012
        for x in memory.watched([batch(3, 3), batch(3, 4, scale=100), batch(3, 5)]):
            model(x)
    assert not getattr(model, "seen", 0)
    assert model.drop.training


@pytest.mark.parametrize("name", MODELS)
def test_failure_127_the_next_micro_batch_of_a_step_does_not_follow_from_it(name: str) -> None:
    refused_between(MODELS[name]())


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_failure_135_nor_from_which_parameters_there_are_and_which_are_trained(name: str) -> None:
    model = OF_PARAMETERS[name]()
    before = [(id(p), p.requires_grad) for p in model.parameters()]
    refused_between(model)
    assert [(id(p), p.requires_grad) for p in model.parameters()] == before, "put back"


LATEST: dict[str, Tensor] = {}


@functools.cache
def scale() -> float:
    return float(LATEST["x"].abs().max())


@functools.lru_cache
def mask(length: int) -> Tensor:
    return torch.ones(length, 1)


class Cached(Plain):
    """The first rows of a process say how all are scaled."""

    def forward(self, x: Tensor) -> Tensor:
        LATEST["x"] = x.detach()
        return super().forward(mask(len(x)) * x / scale())


class Masked(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(mask(len(x)) * x)


def test_failure_130_what_a_cached_function_made_of_the_first_rows_is_refused() -> None:
    scale.cache_clear()
    model = Cached()
    memory = memory_of(model)
    with pytest.raises(UnsupportedModelError, match=r"keeps something of the examples"):  # noqa: PT012
        with memory.restored():
            memory.refuse(batch(2, 0), batch(2, 1), batch(2, 2))
        memory.ask_of(batch(2, 2))
        for x in memory.watched([batch(3, 3), batch(3, 4)]):
            model(x)


def test_a_cached_function_of_lengths_is_not_refused_and_keeps_what_it_has() -> None:
    mask.cache_clear()
    model = Masked()
    memory = memory_of(model)
    memory.refuse(batch(2, 0), batch(2, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for _ in range(2):
        for x in memory.watched([batch(3, 3), batch(4, 4)]):
            model(x)
    assert mask.cache_info().currsize == 2, "from the second step on nobody asks, and empties it"


class OfRows(nn.Module):
    """Ids (B, T) to three classes, by whether one id was in the micro-batch before."""

    def __init__(self, rare: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.rare, self.seen = nn.Embedding(100, 5), nn.Linear(5, 3), rare, False

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids).mean(1) * (2 if self.seen else 1)
        self.seen = bool((ids[:, 0] == self.rare).any())
        return self.out(h)  # type: ignore[no-any-return]


def run_of(model: nn.Module, rare: int) -> Any:
    data = [{"x": [i % 7 + 1, i % 5], "y": i % 3} for i in range(48)]
    data[20]["x"] = [rare, 3]

    def collate(rows: Any) -> Any:
        return {"x": torch.tensor([r["x"] for r in rows]), "y": torch.tensor([r["y"] for r in rows])}

    def loss(model: Any, given: Any) -> Tensor:
        return nn.functional.cross_entropy(model(given["x"]), given["y"], reduction="none")

    return a_run(
        model, private(), dataset=data, collate=collate, loss=loss, expected_batch_size=24, micro_batch_size=2, steps=8
    )


def test_such_a_step_is_refused_before_it_is_paid_for() -> None:
    model = OfRows(rare=9)
    run = run_of(model, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.begin(optimizer)
    with pytest.raises(UnsupportedModelError, match="^seen keeps something"):  # noqa: PT012
        for drawn in run.batches():
            run.step(drawn)
            optimizer.step()
    assert run.ledger.steps < 8
    assert run.ledger.steps == run.global_step


class FrozenByRows(OfRows):
    def forward(self, ids: Tensor) -> Tensor:
        if bool((ids[:, 0] == self.rare).any()):
            self.table.weight.requires_grad_(False)
        return self.out(self.table(ids).mean(1))  # type: ignore[no-any-return]


def test_failure_136_what_is_trained_does_not_follow_from_the_widest_row() -> None:
    model = FrozenByRows(rare=9)
    run = run_of(model, 9)
    with pytest.raises(UnsupportedModelError, match=r"change whether 'table\.weight' is trained"):
        run.begin(torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.table.weight.requires_grad
