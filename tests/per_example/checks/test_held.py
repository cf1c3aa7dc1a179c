"""What is kept in containers, objects and classes: looked at as attributes are, and put back."""

from __future__ import annotations

import types
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks import held
from hf_dp.per_example.checks.held import Held
from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.values import BIG
from tests.per_example.checks.test_memory import Plain, batch, memory_of


@pytest.fixture(autouse=True)
def _of_weights_that_let_something_pass() -> None:
    torch.manual_seed(0)


@dataclass
class Record:
    largest: float = 10.0
    others: list[float] = field(default_factory=list)


class Slotted:
    __slots__ = ("largest",)

    def __init__(self) -> None:
        self.largest = 10.0


class Table(dict[str, float]):
    """A dict of a class of its own."""


class Called:
    """What a hook may be."""

    largest = 10.0

    def __call__(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self.largest = max(self.largest, float(args[0].detach().abs().max()))
        return (args[0] / self.largest,)


# Of each way to keep a number: what is kept, how it is read, and how it is written.
WAYS: dict[str, tuple[Any, Any, Any]] = {
    "a dict": (lambda: {"largest": 10.0}, lambda kept: kept["largest"], lambda kept, x: kept.update(largest=x)),
    "a dict in a dict": (
        lambda: {"all": {"largest": 10.0}},
        lambda kept: kept["all"]["largest"],
        lambda kept, x: kept["all"].update(largest=x),
    ),
    "a list": (lambda: [10.0], lambda kept: kept[0], lambda kept, x: kept.__setitem__(0, x)),
    "a list that grows": (lambda: [10.0], max, lambda kept, x: kept.append(x) if x > max(kept) else None),
    "a deque": (lambda: deque([10.0], 3), max, lambda kept, x: kept.append(x) if x > max(kept) else None),
    "a set": (lambda: {10.0}, max, lambda kept, x: kept.add(x)),
    "a dict in a list": (lambda: [{"x": 10.0}], lambda kept: kept[0]["x"], lambda kept, x: kept[0].update(x=x)),
    "a namespace": (
        lambda: types.SimpleNamespace(largest=10.0),
        lambda kept: kept.largest,
        lambda kept, x: setattr(kept, "largest", x),
    ),
    "a dataclass": (Record, lambda kept: kept.largest, lambda kept, x: setattr(kept, "largest", x)),
    "a list in a dataclass": (
        Record,
        lambda kept: max([10.0, *kept.others]),
        lambda kept, x: kept.others.append(x) if x > max([10.0, *kept.others]) else None,
    ),
    "slots": (Slotted, lambda kept: kept.largest, lambda kept, x: setattr(kept, "largest", x)),
    "a dict of its own": (lambda: Table(x=10.0), lambda kept: kept["x"], lambda kept, x: kept.update(x=x)),
    "an array": (lambda: np.array([10.0]), lambda kept: float(kept[0]), lambda kept, x: kept.fill(x)),
    "an array in a dict": (
        lambda: {"x": np.array([10.0])},
        lambda kept: float(kept["x"][0]),
        lambda kept, x: kept["x"].fill(x),
    ),
    "a tensor in a dict": (
        lambda: {"x": torch.tensor(10.0)},
        lambda kept: float(kept["x"]),
        lambda kept, x: kept["x"].fill_(x),
    ),
}


def keeping(way: str) -> nn.Module:
    make_it, read, write = WAYS[way]

    class Keeping(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.kept = make_it()

        def forward(self, x: Tensor) -> Tensor:
            write(self.kept, max(read(self.kept), float(x.detach().abs().max())))
            return super().forward(x / read(self.kept))

    return Keeping()


class OfItsClass(Plain):
    largest = 10.0

    def forward(self, x: Tensor) -> Tensor:
        OfItsClass.largest = max(OfItsClass.largest, float(x.detach().abs().max()))
        return super().forward(x / OfItsClass.largest)


class InNumPy(Plain):
    largest = np.float32(10)

    def forward(self, x: Tensor) -> Tensor:
        self.largest = np.maximum(self.largest, x.detach().abs().max().numpy())
        return super().forward(x / float(self.largest))


def refused_in_its_step(model: Any, losses: Any, name: str, loss: Any = None) -> None:
    memory = Memory(model, losses, loss)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with memory.unmoved():
        losses(batch(3, 3))
    for _ in range(2):  # put back, it would be written again
        with pytest.raises(UnsupportedModelError, match=rf"({name}).* keeps something"), memory.unmoved():
            losses(batch(3, 3, scale=100))


@pytest.mark.parametrize("way", WAYS)
def test_failure_74_what_one_rare_row_leaves_in_anything_that_a_module_holds(way: str) -> None:
    model = keeping(way)
    refused_in_its_step(model, lambda x: model(x).sum(1), "^kept")


@pytest.mark.parametrize("way", WAYS)
def test_failure_74_or_that_what_computes_losses_holds(way: str) -> None:
    make_it, read, write = WAYS[way]
    model = Plain()

    class Loss:
        def __init__(self) -> None:
            self.kept = make_it()

        def __call__(self, x: Tensor) -> Tensor:
            write(self.kept, max(read(self.kept), float(x.detach().abs().max())))
            return model(x / read(self.kept)).sum(1)

    refused_in_its_step(model, loss := Loss(), "^Loss.kept", loss)


@pytest.mark.parametrize("way", WAYS)
def test_failure_74_a_first_row_in_anything(way: str) -> None:
    """What every row moves is refused before the first step."""
    model = keeping(way)
    with pytest.raises(UnsupportedModelError, match=r"^kept.* keeps something"):
        memory_of(model).refuse(batch(1, 0, scale=100), batch(1, 1, scale=200), batch(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"^kept.* keeps something"):
        memory_of(model).refuse(batch(1, 0, scale=100), batch(1, 1, scale=200), batch(2, 2))


@pytest.mark.parametrize("hook", [Called(), Called().__call__], ids=["object", "method"])
def test_failure_74_an_object_that_is_a_hook(hook: Any) -> None:
    model = Plain()
    model.register_forward_pre_hook(hook)
    refused_in_its_step(model, lambda x: model(x).sum(1), "_forward_pre_hooks")


@pytest.mark.parametrize("kind", [OfItsClass, InNumPy])
def test_failure_74_a_class_attribute_and_a_number_of_numpy(kind: type[Plain]) -> None:
    model = kind()
    refused_in_its_step(model, lambda x: model(x).sum(1), "largest")
    assert float(model.largest) == 10  # type: ignore[arg-type]


def test_failure_74_what_is_kept_by_words_is_refused_by_the_batch_that_left_it() -> None:
    class Known(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[float, float] = {}

        def forward(self, x: Tensor) -> Tensor:
            times = []
            for row in x.detach():
                key = round(float(row.sum()), 3)
                times.append(self.seen.get(key, 1.0))
                self.seen[key] = 0.5 * times[-1]
            return super().forward(x * torch.tensor(times)[:, None])

    model = Known()
    with pytest.raises(UnsupportedModelError, match="^seen.* keeps something"):
        memory_of(model).refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    assert not model.seen


class Harmless(Plain):
    """Caches that follow from shapes, and notes that nothing reads, in each kind of container."""

    noted: list[float] = []  # noqa: RUF012 - of the class, as careless code has it

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}
        self.metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
        self.counts: dict[str, int] = {"passes": 0}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.record = Record()
        self.sizes: set[int] = set()
        self.log: list[dict[str, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.ones(len(x), 1)
        self.metrics["train"]["mean"].append(float(x.detach().mean()))
        self.counts["passes"] += 1
        self.recent.append(x.detach().mean(0))
        self.record.largest = max(self.record.largest, float(x.detach().max()))
        self.record.others.append(1.0)
        self.sizes.add(len(x))
        self.noted.append(float(x.detach().mean()))
        self.log.append({"mean": float(x.detach().mean())})
        return super().forward(x * self.cache[len(x)])


def test_caches_and_notes_in_containers_are_not_refused_and_stay() -> None:
    model, passes = Harmless(), []
    memory = Memory(model, lambda x: (passes.append(len(x)), model(x).sum(1))[1])
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    assert not model.cache
    assert model.counts == {"passes": 0}
    for number, size in enumerate((3, 5, 4, 3, 5, 4), 1):
        del passes[:]
        with memory.unmoved():
            model(batch(size, size, scale=10.0 * number))
        assert model.counts == {"passes": number}, "what a step has noted stays, and not what was asked of it"
        assert len(model.log) == len(model.metrics["train"]["mean"]) == number
    assert not passes, "where nothing is new, nothing is computed"
    assert {*model.cache} == {3, 4, 5}


def test_what_is_held_is_put_back_as_the_same_objects() -> None:
    model: Any = Harmless()
    model(batch(2, 0))
    model.file = None
    ones = model.cache[2]
    held = {name: vars(model)[name] for name in ("cache", "metrics", "counts", "recent", "record", "sizes", "log")}
    before, noted = repr(held), list(model.noted)
    with Held(model.named_modules()).put_back():
        model(batch(3, 0, scale=100))
        model.late, model.counts = {"x": 1}, {"passes": 7}
        model.cache[2].fill_(7)
        model.file = Path(__file__).open()  # noqa: SIM115
    assert repr(held) == before
    assert all(vars(model)[name] is value for name, value in held.items())
    assert Harmless.noted == noted
    assert not hasattr(model, "late")
    assert model.cache[2] is ones
    assert ones.tolist() == [[1.0], [1.0]]
    with model.file as file:
        assert not file.closed, "what was opened stays open"


@pytest.mark.slow
def test_large_things_are_not_copied() -> None:
    class Data:
        def __init__(self) -> None:
            self.rows = [{"input_ids": list(range(50))} for _ in range(100_000)]
            self.texts = ["a text"] * 1_000_000
            self.matrix = np.zeros(1 << 23, dtype=np.int8)
            self.vocabulary = {str(i): i for i in range(100_000)}

    model: Any = Plain()
    model.data = Data()
    values = Held(model.named_modules()).values
    assert len(values) < 6000
    with Held(model.named_modules()).put_back():
        model.data.texts.append("x")
    assert len(model.data.texts) == 1_000_001, "what is not looked at is left alone"


def test_a_hook_that_came_meanwhile_stays() -> None:
    """The dicts of hooks, which every module has, are looked at where something is in them."""
    model = nn.Linear(2, 2)
    with Held([("", model)]).put_back():
        model.register_state_dict_pre_hook(lambda *_: None)
    assert len(model._state_dict_pre_hooks) == 1
    assert model.state_dict().keys() == {"weight", "bias"}


def test_of_a_dict_that_holds_all_data_not_all_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_NUMBERS", 8)
    rows = {i: torch.full((4,), float(i)) for i in range(9)}
    values = Held([("", types.SimpleNamespace(rows=rows))]).values
    assert [value is BIG for value in values.values()] == [False] + 8 * [True]
