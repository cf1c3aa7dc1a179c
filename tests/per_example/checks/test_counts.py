"""How many passes, or rows, there were: losses may not follow from that, however many it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from tests.per_example.checks.test_kept import Memory
from tests.per_example.checks.test_memory import Plain, batch, memory_of

LATE = 10_000


@pytest.fixture(autouse=True)
def _of_weights_that_let_something_pass() -> None:
    torch.manual_seed(0)


def mixed(h: Tensor) -> Tensor:
    return h - h.mean(0)


class Late(Plain):
    """From so many passes on it mixes what passes."""

    def __init__(self, count: Any = 0) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        h = super().forward(x)
        return mixed(h) if self.is_late() else h

    def is_late(self) -> bool:
        return bool(self.count > LATE)


class OfRows(Late):
    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x) - 1
        return super().forward(x)


class OfLargeRows(Late):
    def forward(self, x: Tensor) -> Tensor:
        self.count += int((x.detach() > 1).sum())
        return super().forward(x)


class EveryHundredth(Late):
    def is_late(self) -> bool:
        return int(self.count) % 100 == 0


class Before(Late):
    def forward(self, x: Tensor) -> Tensor:
        h = Plain.forward(self, x)
        h = mixed(h) if self.count and self.count % 100 == 0 else h
        self.count += 1
        return h


class InADict(Late):
    def __init__(self) -> None:
        super().__init__({"passes": 0})

    def forward(self, x: Tensor) -> Tensor:
        self.count["passes"] += 1
        h = Plain.forward(self, x)
        return mixed(h) if self.count["passes"] > LATE else h


class InABuffer(Late):
    def __init__(self) -> None:
        super().__init__()
        del self.count
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)


MODELS = {
    "passes": Late,
    "passes, as a float": lambda: Late(0.0),
    "passes, by NumPy": lambda: Late(np.int64(0)),
    "passes, in a tensor": lambda: Late(torch.zeros(1, dtype=torch.long)),
    "passes, in a dict": InADict,
    "passes, in a buffer": InABuffer,
    "rows": OfRows,
    "numbers in rows": OfLargeRows,
    "every hundredth pass": EveryHundredth,
    "every hundredth pass, counted afterwards": Before,
}


@pytest.mark.parametrize("name", MODELS)
def test_failure_125_a_model_that_mixes_examples_after_so_many_is_refused_before_a_step(name: str) -> None:
    model = MODELS[name]()
    with pytest.raises(UnsupportedModelError, match=r"^count\S* (counts|keeps something of)"):
        memory_of(model).refuse(batch(2, 0), batch(2, 1), batch(2, 2))


def test_so_is_a_loss() -> None:
    count = 0

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        found: Tensor = model(x).sum(1)
        return mixed(found) if count > LATE else found

    model = Plain()
    with pytest.raises(UnsupportedModelError, match="count counts the passes"):
        Memory(model, lambda x: losses(model, x), losses).refuse(batch(2, 0), batch(2, 1), batch(2, 2))


class OfRareRows(Late):
    """It counts rows that none of the first is like."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += int(x.detach().abs().max() > 10) - 1
        return super().forward(x)

    def is_late(self) -> bool:
        return bool(self.count > 5)


def test_a_count_of_rare_rows_is_refused_in_the_step_that_makes_it_matter() -> None:
    model = OfRareRows()
    memory = memory_of(model)
    memory.refuse(batch(2, 0), batch(2, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with pytest.raises(UnsupportedModelError, match="^count keeps something"):  # noqa: PT012
        for seed in range(9):
            with memory.unmoved():
                model(batch(3, seed, scale=100))
    assert model.count == 5


class Counting(Plain):
    """Counts that nobody reads, a length that does not grow, and an index that goes round."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.rows, self.longest, self.seen = 0, torch.zeros((), dtype=torch.long), 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.rows = self.rows + len(x)
        self.longest = max(self.longest, len(x))
        self.seen[0] += 1
        return super().forward(torch.ones(self.longest, 1)[: len(x)] * x)


def test_counts_that_nothing_follows_from_are_not_refused() -> None:
    model = Counting()
    memory = memory_of(model)
    memory.refuse(batch(2, 0), batch(2, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for seed in (3, 4):
        with memory.unmoved():
            model(batch(3, seed))
    assert model.passes == 2
