"""How many passes, or rows, there were: losses may not follow from that, however many it takes."""

from __future__ import annotations

import math
from collections import deque
from decimal import Decimal
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


class Down(Late):
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count - 2
        return super().forward(x)

    def is_late(self) -> bool:
        return bool(self.count <= 0)


class FarDown(Down):
    def is_late(self) -> bool:
        return bool(self.count < -LATE)


class DownOfLargeRows(Late):
    def forward(self, x: Tensor) -> Tensor:
        self.count -= int((x.detach() > 1).sum()) + 1
        return super().forward(x)

    def is_late(self) -> bool:
        return bool(self.count < -LATE)


class ByParts(Late):
    def forward(self, x: Tensor) -> Tensor:
        self.count -= type(self.count)("0.9")
        return super().forward(x)


class Halving(Late):
    def __init__(self) -> None:
        super().__init__(1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.count = 0.5 * self.count - 1
        return super().forward(x)

    def is_late(self) -> bool:
        return self.count < 1e-9


class Within(Late):
    """It counts in one place of what holds several."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.count, tuple):
            self.count = (self.count[0], self.count[1] + 1)
        else:
            self.count[1] += 1
        h = Plain.forward(self, x)
        return mixed(h) if self.count[1] > LATE else h


class ByLength(Late):
    """It counts by how long something is."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.count, set):
            self.count.add(len(self.count))
        elif isinstance(self.count, tuple):
            self.count = (*self.count, 0)
        else:
            self.count.append(x.detach()[0, 0])
        h = Plain.forward(self, x)
        return mixed(h) if self.is_late() else h

    def is_late(self) -> bool:
        return len(self.count) > LATE


class ByItsHundreds(ByLength):
    def is_late(self) -> bool:
        return len(self.count) % 100 == 0


class UsedUp(ByLength):
    def forward(self, x: Tensor) -> Tensor:
        if self.count:
            self.count.pop()
        h = Plain.forward(self, x)
        return h if self.count else mixed(h)


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
OF_OTHER_KINDS = {
    "down": lambda: Down(LATE),
    "down, as a float": lambda: Down(float(LATE)),
    "down, by NumPy": lambda: Down(np.float32(LATE)),
    "down, in a tensor": lambda: Down(torch.full((), float(LATE))),
    "far down": FarDown,
    "numbers in rows, downwards": lambda: DownOfLargeRows(0),
    "by parts": lambda: ByParts(0.0),
    "by parts, exactly": lambda: ByParts(Decimal(0)),
    "by halves": Halving,
    "in a list": lambda: Within([0, 0]),
    "in a tuple": lambda: Within((0, 0)),
    "in a vector": lambda: Within(torch.zeros(3)),
    "in an array": lambda: Within(np.zeros(3, dtype=int)),
    "by the length of a list": lambda: ByLength([]),
    "by the length of a tuple": lambda: ByLength((0,)),
    "by the length of a deque": lambda: ByLength(deque()),
    "by how many a set has": lambda: ByLength(set()),
    "by hundreds of a list": lambda: ByItsHundreds([]),
    "by a list that is used up": lambda: UsedUp([0] * 100),
}


def refused_before_a_step(model: Plain) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^count\S* (counts|keeps something of)"):
        memory_of(model).refuse(batch(2, 0), batch(2, 1), batch(2, 2))


@pytest.mark.parametrize("name", MODELS)
def test_failure_125_a_model_that_mixes_examples_after_so_many_is_refused_before_a_step(name: str) -> None:
    refused_before_a_step(MODELS[name]())


@pytest.mark.parametrize("name", OF_OTHER_KINDS)
def test_failure_134_however_it_counts_them(name: str) -> None:
    refused_before_a_step(OF_OTHER_KINDS[name]())


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


class DownOfRareRows(OfRareRows):
    def forward(self, x: Tensor) -> Tensor:
        self.count -= 2 * int(x.detach().abs().max() > 10)
        return super().forward(x)

    def is_late(self) -> bool:
        return bool(self.count < -5)


class UpAndDown(DownOfRareRows):
    """It counts one kind up, and then another one down."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 2 * int(x.detach().abs().max() > 1000)
        return super().forward(x)


class ByLengthOfRareRows(OfRareRows):
    def forward(self, x: Tensor) -> Tensor:
        self.count += [0] * int(x.detach().abs().max() > 10)
        h = Plain.forward(self, x)
        return mixed(h) if len(self.count) > 5 else h


@pytest.mark.parametrize("make", [OfRareRows, DownOfRareRows, lambda: ByLengthOfRareRows([])])
def test_a_count_of_rare_rows_is_refused_in_the_step_that_makes_it_matter(make: Any) -> None:
    model = make()
    memory = memory_of(model)
    memory.refuse(batch(2, 0), batch(2, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with pytest.raises(UnsupportedModelError, match="^count keeps something"):  # noqa: PT012
        for seed in range(9):
            with memory.unmoved():
                model(batch(3, seed, scale=100))
    assert (abs(model.count) if isinstance(model.count, int) else len(model.count)) == 5


def test_what_rose_with_one_row_and_falls_with_others_is_asked_about_again() -> None:
    model = UpAndDown()
    memory = memory_of(model)
    memory.refuse(batch(2, 0), batch(2, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with memory.unmoved():
        model(batch(3, 0, scale=10_000))
    assert model.count == 1
    with pytest.raises(UnsupportedModelError, match="^count keeps something"):  # noqa: PT012
        for seed in range(9):
            with memory.unmoved():
                model(batch(3, seed, scale=100))


class Counting(Plain):
    """Counts that nobody reads, a length that does not grow, and an index that goes round."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.rows, self.longest, self.seen = 0, torch.zeros((), dtype=torch.long), 0, [0]
        self.left, self.losses, self.kinds, self.lengths = 10.0, list[Any](), set[str](), torch.zeros(9)
        self.shape, self.pair = (), (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.left *= 0.9
        self.losses.append(x.detach().mean())
        self.kinds.add(f"of {len(x)}, {self.passes}")
        self.lengths[len(x)] += 1
        self.shape, self.pair = x.shape, (len(x), self.passes)
        assert sorted(self.kinds)
        assert len(self.pair) == len(self.shape)
        self.rows = self.rows + len(x)
        self.longest = max(self.longest, len(x))
        self.seen[0] += 1
        return super().forward(torch.ones(self.longest, 1)[: len(x)] * x)


class Told(Plain):
    """What is told of a training divides by counts and sums of it, takes roots of them, and powers."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.rows, self.total, self.mean, self.seen, self.told = 0, 0, 0.0, 0.0, torch.zeros(3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.rows += len(x)
        h = super().forward(x)
        size = float(h.detach().abs().mean())
        self.total += size
        self.mean += (size - self.mean) / 10
        self.seen = self.seen + x.new_tensor([1, 2, 3])
        assert self.rows > 0
        self.told = math.sqrt(self.rows) + math.log(self.passes) + self.mean / (1 - 0.9**self.passes)
        self.told += math.exp(self.total / self.rows)
        self.told += float(torch.distributions.Categorical(self.seen / self.seen.sum()).entropy())
        return h


@pytest.mark.parametrize("kind", [Counting, Told], ids=["that nothing follows from", "that are told of a training"])
def test_counts_are_not_refused(kind: type[Counting | Told]) -> None:
    model = kind()
    memory = memory_of(model)
    memory.refuse(batch(2, 0), batch(2, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for seed in (3, 4):
        with memory.unmoved():
            model(batch(3, seed))
    assert model.passes == 2


class Scheduled(Late):
    """Each pass has a number of its own, of as many as were thought of."""

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        h = Plain.forward(self, x)
        return [h, h, h, h, h, mixed(h)][max(0, self.count)]

    def is_late(self) -> bool:
        return False


def test_a_count_that_nothing_can_be_computed_of_when_it_has_gone_on_is_refused() -> None:
    refused_before_a_step(Scheduled())


class ByPartsUpTo(Late):
    """Of a sum of parts nothing can be computed where it is very large, and other things before."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 0.1
        math.exp(self.count / 100)
        h = Plain.forward(self, x)
        return mixed(h) if self.count > 100 else h


def test_a_sum_that_is_too_much_for_what_is_computed_of_it_is_asked_about_before() -> None:
    refused_before_a_step(ByPartsUpTo())
