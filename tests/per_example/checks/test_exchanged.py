"""What one rare row exchanges: a function, an object, a module, a mode. Refused in its step, and put back."""

from __future__ import annotations

import array
import decimal
import enum
import fractions
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from tests.per_example.checks.test_memory import Plain, batch, memory_of

BOUND = 10.0


@pytest.fixture(autouse=True)
def _of_weights_that_let_something_pass() -> None:
    torch.manual_seed(0)


class Mode(enum.Enum):
    CALM, LOUD = 1, 2


class Calm:
    def __call__(self, x: Tensor) -> Tensor:
        return x


class Loud:
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def as_it_is(x: Tensor) -> Tensor:
    return x


ACTS: Any = {"act": torch.relu}
# Of each kind: what there is, what a rare row puts in its place, and what follows.
WAYS: dict[str, tuple[Any, Any, Callable[[Any, Tensor], Tensor]]] = {
    "a function of torch": (torch.relu, torch.tanh, lambda kept, x: kept(x)),
    "a function": (as_it_is, doubled, lambda kept, x: kept(x)),
    "a method": (Calm().__call__, Loud().__call__, lambda kept, x: kept(x)),
    "a method of a module": (nn.ReLU().forward, nn.Tanh().forward, lambda kept, x: kept(x)),
    "an object": (Calm(), Loud(), lambda kept, x: kept(x)),
    "a class": (Calm, Loud, lambda kept, x: kept()(x)),
    "a class of torch": (nn.ReLU, nn.Tanh, lambda kept, x: kept()(x)),
    "a member of an enumeration": (Mode.CALM, Mode.LOUD, lambda kept, x: 2 * x if kept is Mode.LOUD else x),
    "a decimal": (decimal.Decimal(1), decimal.Decimal(2), lambda kept, x: x * float(kept)),
    "a fraction": (fractions.Fraction(1), fractions.Fraction(2), lambda kept, x: x * float(kept)),
    "a range": (range(1), range(2), lambda kept, x: x * len(kept)),
    "a type of numbers": (torch.float32, torch.float16, lambda kept, x: x * torch.finfo(kept).eps),
    "an array": (array.array("d", [1.0]), array.array("d", [2.0]), lambda kept, x: x * kept[0]),
    "a module in a dict": ({"act": nn.ReLU()}, {"act": nn.Tanh()}, lambda kept, x: kept["act"](x)),
    "a function in a dict": ({"act": torch.relu}, {"act": torch.tanh}, lambda kept, x: kept["act"](x)),
    "a module": (nn.ReLU(), nn.Tanh(), lambda kept, x: kept(x)),
}


class Keeps(Plain):
    def __init__(self, first: Any, then: Any, follow: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept = first
        vars(self)["then"], self.follow = {"one": then}, follow

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > BOUND:
            self.exchange()
        return super().forward(self.follow(self.kept, x))

    def exchange(self) -> None:
        self.kept = vars(self)["then"]["one"]


class InPlace(Keeps):
    """It changes what it has, and exchanges nothing."""

    def exchange(self) -> None:
        self.kept[0] = 2.0


class OfAFile(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > BOUND:
            ACTS["act"] = torch.tanh
        return super().forward(ACTS["act"](x))


class Built(Plain):
    """A rare row changes what it is built of."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change, self.drop, self.act = change, nn.Dropout(0.5), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > BOUND:
            self.change(self)
        return super().forward(self.drop(self.act(x)))


def with_another_forward(model: Any) -> None:
    model.act.forward = torch.tanh


def with_another_class(model: Any) -> None:
    model.act.__class__ = nn.Tanh


def with_another_module(model: Any) -> None:
    model.act = nn.Tanh()


def without_its_dropout(model: Any) -> None:
    model.drop.eval()


def with_frozen_weights(model: Any) -> None:
    model.first.requires_grad_(False)


def with_another_parameter(model: Any) -> None:
    model.last.bias = nn.Parameter(model.last.bias.detach() + 1)


def with_one_more_parameter(model: Any) -> None:
    model.last.more = nn.Parameter(torch.ones(3))
    model.last.forward = lambda h: nn.Linear.forward(model.last, h) + model.last.more


CHANGES = [nn.Module.eval, without_its_dropout, with_another_forward, with_another_class, with_another_module]
CHANGES += [with_frozen_weights, with_another_parameter, with_one_more_parameter]
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda way=way: Keeps(*way) for name, way in WAYS.items()},
    "an array that is written to": lambda: InPlace(*WAYS["an array"]),
    "a function in a dict of a file": OfAFile,
    **{change.__name__: lambda change=change: Built(change) for change in CHANGES},
}


@pytest.mark.parametrize("name", MODELS)
def test_failure_126_what_a_rare_row_exchanges_is_refused_in_its_step(name: str) -> None:
    model = MODELS[name]()
    memory = memory_of(model)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    torch.manual_seed(1)
    before = model(batch(2, 2))
    with memory.unmoved():
        model(batch(3, 3))
    with pytest.raises(UnsupportedModelError, match="keeps something of the examples"), memory.unmoved():
        model(batch(3, 3, scale=100))
    torch.manual_seed(1)
    assert torch.equal(model(batch(2, 2)), before), "put back"


class Anew(Plain):
    """What it needs is made anew in each pass, or once, and is what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.scale = nn.Dropout(0.5), 2.0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        self.frozen.eval()
        self.calm, self.act, self.of, self.kind = Calm(), (lambda h: scale * h), x.relu, type(x)
        if not hasattr(self, "late"):
            self.late = nn.Tanh()
        return super().forward(self.late(self.act(self.calm(self.frozen(self.of())))))


class Closing(Plain):
    """Objects that are gone when others have taken their places: they can be asked about all the same."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.act = self.made(Calm, torch.ones(()))

    def made(self, kind: Any, times: Tensor) -> Any:
        if self.way == "a dict of a class of its own":
            return {Calm: dict, Loud: Louder}[kind](times=1.0)
        if self.way == "a closure":
            return (lambda x: times * x) if kind is Calm else (lambda x: 2 * times * x)
        return kind().__call__ if self.way == "a method" else kind()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().abs().max()) > BOUND:
            self.act = self.made(Loud, torch.ones(()))
        return super().forward(x * self.act["times"] if isinstance(self.act, dict) else self.act(x))


class Louder(dict[str, float]):
    def __getitem__(self, name: str) -> float:
        return 2 * super().__getitem__(name)


@pytest.mark.parametrize("way", ["an object", "a method", "a closure", "a dict of a class of its own"])
def test_what_is_gone_when_it_was_exchanged_is_asked_about_too(way: str) -> None:
    model = Closing(way)
    memory = memory_of(model)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    with pytest.raises(UnsupportedModelError, match="act keeps something of the examples"), memory.unmoved():
        model(batch(3, 3, scale=100))


def test_what_is_made_anew_and_is_what_it_was_is_not_refused() -> None:
    model = Anew()
    memory = memory_of(model)
    memory.refuse(batch(1, 0), batch(1, 1), batch(2, 2))
    memory.ask_of(batch(2, 2))
    for seed in (3, 4):
        model.train()
        with memory.unmoved():
            model(batch(3, seed, scale=100))
    assert isinstance(model.late, nn.Tanh), "it stays"
