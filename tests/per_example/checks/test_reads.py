"""What a pass reads of attributes is noted, wherever it is held, and told when it is another."""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import ChainMap
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.reads import AsRead, Reads, reads_of


class Held(nn.Module):
    mode = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.unread, self.rates = nn.Linear(2, 2), 2.0, 1, {"first": [1.0, 2.0]}
        self.type: Any = "as modules have a method"
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x) * len(self.type) * self.scale * self.frozen + self.offset * getattr(self, "later", 0.0)
        return self.extra(made * self.rates["first"][0] * self.mode)

    def extra(self, x: Tensor) -> Tensor:
        return x


def as_read(model: nn.Module, loss: Any = None) -> AsRead:
    memory = Memory(model, lambda x: (loss or model)(x).sum(1), loss)
    return AsRead(model, memory.read_by(torch.ones(3, 2)))


def test_what_is_read_is_told_and_what_is_not_is_not() -> None:
    model = Held()
    before = nn.Module.__dict__.get("__getattribute__")
    known = as_read(model)
    assert nn.Module.__dict__.get("__getattribute__") is before
    model.unread, model.linear.notes = 5, "new"
    assert known.changed() is None
    with torch.no_grad():
        model.linear.weight.add_(1)  # which the training moves
    assert known.changed() is None
    for name, change in (
        ("scale", lambda: setattr(model, "scale", 3.0)),
        ("later", lambda: setattr(model, "later", 1.0)),
        ("rates.first", lambda: model.rates["first"].__setitem__(0, 5.0)),
        ("offset", lambda: model.offset.add_(1)),
        ("mode", lambda: setattr(model, "mode", 2.0)),
        ("type", lambda: setattr(model, "type", "another")),
        ("extra", lambda: setattr(model, "extra", lambda x: x)),
        ("frozen", lambda: model.frozen.add_(1)),
    ):
        known.note()
        with torch.no_grad():
            change()
        assert known.changed() in (name, name.partition(".")[0])
    known.note()
    assert known.changed() is None


def test_the_same_numbers_written_again_are_no_change() -> None:
    model = Held()
    known = as_read(model)
    model.offset.copy_(model.offset.clone())
    model.rates = {"first": [1.0, 2.0]}
    assert known.changed() is None


@dataclass
class Told:
    factor: float = 1.0


class Chosen:
    factor = 1.0


TOLD, SPACE = Told(), argparse.Namespace(factor=1.0)


class Criterion:
    def __init__(self) -> None:
        self.inner = functools.partial(self.scaled, 2)
        self.told = Told()

    def scaled(self, times: int, x: Tensor) -> Tensor:
        return times * x

    @property
    def hidden(self) -> float:
        return SPACE.factor

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.told.factor * TOLD.factor * Chosen.factor * self.hidden


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda loss: setattr(loss.told, "factor", 3.0), id="settings in an object"),
        pytest.param(lambda loss: setattr(TOLD, "factor", 3.0), id="settings of the file"),
        pytest.param(lambda loss: setattr(Chosen, "factor", 3.0), id="a class"),
        pytest.param(lambda loss: setattr(SPACE, "factor", 3.0), id="behind a property"),
        pytest.param(lambda loss: setattr(loss, "inner", lambda x: x), id="another function"),
        pytest.param(lambda loss: setattr(loss, "told", Criterion()), id="another object"),
    ],
)
def test_what_computes_losses_is_seen_wherever_its_values_are(change: Any) -> None:
    loss = Criterion()
    known = as_read(nn.Linear(2, 2), loss)
    assert known.changed() is None
    try:
        change(loss)
        assert known.changed() is not None
    finally:
        TOLD.factor = Chosen.factor = SPACE.factor = 1.0


OUTER, INNER = types.ModuleType("of_a_user"), types.ModuleType("of_a_user.settings")
OUTER.settings, INNER.factor = INNER, 1.0  # type: ignore[attr-defined]
TERMS: list[Any] = [("plain", Told()), {"factor": 1.0}]
PROXIED = {"factor": 1.0}
PROXY, BOUND = types.MappingProxyType(PROXIED), argparse.Namespace(factor=1.0)


class Aliased(PretrainedConfig):
    model_type, attribute_map = "aliased", {"factor": "other"}
    other: float = 1.0


class Kind(type):
    factor = 1.0


class OfKind(metaclass=Kind):
    pass


class Inheriting(Chosen):
    @classmethod
    def of_class(cls) -> float:
        return cls.factor


class Asked:
    """A descriptor, which has no value of its own."""

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return ASKED["factor"]


class Asking:
    factor = Asked()


ASKED, CHAIN = {"factor": 1.0}, ChainMap({"factor": 1.0}, {})


class Named(Criterion):
    """Its values are where no attribute of its own says so."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.by_told = Aliased(), functools.partial(factor_of, Told())
        self.bound, self.space = types.MethodType(bound, self), Told()

    def __call__(self, x: Tensor) -> Tensor:
        from_lists = TERMS[0][1].factor * TERMS[1]["factor"]
        from_functions = noting.factor * by_default() * by_name() * cached() * imported() * self.bound()  # type: ignore[attr-defined]
        factors = from_lists * from_functions * PROXY["factor"] * OUTER.settings.factor
        by_classes = Inheriting.of_class() * Asking().factor * OfKind.factor * CHAIN["factor"]
        return x * factors * self.config.factor * self.by_told() * vars(self.space)["factor"] * by_classes


def factor_of(told: Any) -> float:
    return float(told.factor)


def noting() -> None: ...


noting.factor = 1.0  # type: ignore[attr-defined]


def by_default(told: Told = Told()) -> float:  # noqa: B008
    return told.factor


def by_name(*, told: dict[str, float] = {"factor": 1.0}) -> float:  # noqa: B006
    return told["factor"]


@functools.lru_cache(maxsize=0)
def cached() -> float:
    return Chosen.factor


def imported() -> float:
    import of_a_user.settings as settings  # type: ignore[import-not-found]

    return settings.factor  # type: ignore[no-any-return]


def bound(self: Any) -> float:
    return float(BOUND.factor)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda loss: setattr(TERMS[0][1], "factor", 3.0), id="an object in a tuple"),
        pytest.param(lambda loss: TERMS[1].update(factor=3.0), id="a dict in a list of the file"),
        pytest.param(lambda loss: PROXIED.update(factor=3.0), id="a dict that is read through a proxy"),
        pytest.param(lambda loss: setattr(INNER, "factor", 3.0), id="a module within a module, and one imported late"),
        pytest.param(lambda loss: setattr(loss.config, "factor", 3.0), id="a config's other name"),
        pytest.param(lambda loss: setattr(loss.by_told.args[0], "factor", 3.0), id="an argument of a partial"),
        pytest.param(lambda loss: setattr(noting, "factor", 3.0), id="an attribute of a function"),
        pytest.param(lambda loss: setattr(by_default.__defaults__[0], "factor", 3.0), id="a default"),  # type: ignore[index]
        pytest.param(lambda loss: by_name.__kwdefaults__["told"].update(factor=3.0), id="a default by name"),
        pytest.param(lambda loss: setattr(Chosen, "factor", 3.0), id="behind a cache"),
        pytest.param(lambda loss: setattr(BOUND, "factor", 3.0), id="behind a function made a method"),
        pytest.param(lambda loss: setattr(loss.space, "factor", 3.0), id="all that an object holds"),
        pytest.param(lambda loss: setattr(Kind, "factor", 3.0), id="a class of a class"),
        pytest.param(lambda loss: ASKED.update(factor=3.0), id="behind a descriptor"),
        pytest.param(lambda loss: CHAIN.update(factor=3.0), id="a chain of dicts"),
    ],
)
def test_failure_98_what_no_attribute_tells_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "of_a_user", OUTER)
    monkeypatch.setitem(sys.modules, "of_a_user.settings", INNER)
    loss = Named()
    known = as_read(nn.Linear(2, 2), loss)
    known.note()
    assert known.changed() is None
    change(loss)
    try:
        assert known.changed() is not None
    finally:
        for told in (TERMS[0][1], noting, by_default.__defaults__[0], Chosen, INNER, BOUND, Kind):  # type: ignore[index]
            told.factor = 1.0
        for told in (TERMS[1], PROXIED, by_name.__kwdefaults__["told"], ASKED, CHAIN):
            told["factor"] = 1.0


def scaled_by(factor: float, x: Tensor, terms: Any = ()) -> Tensor:
    return x * factor + sum(terms)


def test_a_partial_that_was_made_again_is_no_change() -> None:
    """As that of checkpointing, which an evaluation switches off and on: all was checked again after each of TRL's."""
    model = Held()
    model.extra = functools.partial(scaled_by, 2.0, terms=[1.0])  # type: ignore[method-assign]
    known = as_read(model)
    model.extra = functools.partial(scaled_by, 2.0, terms=[1.0])  # type: ignore[method-assign]
    assert known.changed() is None
    for other in (
        functools.partial(scaled_by, 3.0, terms=[1.0]),
        functools.partial(scaled_by, 2.0, terms=[2.0]),
        functools.partial(scaled_by, 2.0),
        functools.partial(lambda factor, x, terms: x, 2.0, terms=[1.0]),
    ):
        model.extra = other  # type: ignore[method-assign]
        assert known.changed() == "extra"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_weights_of_a_recurrent_layer_are_what_training_moves(kind: type[nn.Module]) -> None:
    """They are in a list of its own besides, and all was checked again before each step."""
    model = kind(2, 2)
    memory = Memory(model, lambda x: model(x)[0].sum(1), None)
    known = AsRead(model, memory.read_by(torch.ones(3, 2)))
    with torch.no_grad():
        model.weight_hh_l0.add_(1)  # type: ignore[operator]
    assert known.changed() is None
    model.dropout = 0.5  # type: ignore[assignment]
    assert known.changed() == "dropout"


def test_classes_are_as_before_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), reads_of({"": TOLD}):
        raise ZeroDivisionError
    assert "__getattribute__" not in vars(Told)


def _in_itself(kind: Any) -> Any:
    made = kind()
    made.update(me=made) if kind is dict else made.append(made)
    return made


@pytest.mark.parametrize(
    "large",
    [[*range(20_000)], [[[[[[0.0]]]]]], _in_itself(list), _in_itself(dict)],
    ids=["long", "deep", "list", "dict"],
)
def test_what_is_too_large_to_be_copied_is_no_change_until_it_is_another(large: Any) -> None:
    """A vocabulary, say: all was checked again before each step."""
    model = Held()
    model.words = large
    model.extra = lambda x: x * (1.0 if model.words else 0.0)  # type: ignore[method-assign]
    known = as_read(model)
    assert known.changed() is None
    known.note()
    assert known.changed() is None
    model.words = [1]
    assert known.changed() == "words"


class Nothing:
    """A proxy of what is not there."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("working outside of a context")


def test_proxies_of_nothing_and_tensors_without_numbers_are_no_obstacle() -> None:
    model = Held()
    model.of_nothing, model.on_meta = Nothing(), [torch.zeros(2, device="meta")]
    known = as_read(model)
    assert known.changed() is None
    model.scale = 5.0
    assert known.changed() == "scale"


def test_a_proxy_of_nothing_hides_no_others_of_its_list() -> None:
    term = SimpleNamespace(weight=0.0)
    assert any(one is term for one in Reads({"": SimpleNamespace(terms=[Nothing(), term])}).owners.values())
