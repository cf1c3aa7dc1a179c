"""What is looked at again is what is found anew, whatever has changed, and nothing of a pass is held on to."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_dp.per_example.checks.again import looked_at
from hf_dp.per_example.checks.built import built
from hf_dp.per_example.checks.held import Held
from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.values import here, same
from hf_dp.per_example.modules import named_modules


class _Object:
    kept: Any = 1

    def __init__(self) -> None:
        self.number, self.inner = 1.5, {"a": [1, 2]}


class _Slotted:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 3


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.count, self.text, self.none = 1, "words", None
        self.numbers, self.series, self.members = [1, 2], (1, [2]), {1, 2}
        self.tensor, self.array, self.device = torch.zeros(3), np.zeros(3), torch.device("cpu")
        self.table, self.empty, self.ordered = {"a": 1, "b": {"c": 2}}, dict[str, Any](), OrderedDict(x=1)
        self.of_tables = {"on": {"x": 1}, "off": {"y": 2}}
        self.one, self.several, self.slotted = _Object(), [_Object(), _Object()], _Slotted()
        self.lists = [torch.zeros(2), torch.zeros(2)]
        self.queue, self.long = deque([1, 2], 3), list(range(1 << 15))
        self.objects = [_Object() for _ in range(2)] + list(range(1 << 15))  # too long to be copied
        self.words = ["word"] * (1 << 15)
        self.register_buffer("kept", torch.zeros(2), persistent=False)

        def compute(x: Any, scale: float = 2.0) -> Any:
            return x * scale * self.count

        self.compute = compute


_CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "mode": lambda m: m.eval(),
    "a number": lambda m: setattr(m, "text", m.text + "!"),
    "its kind": lambda m: setattr(m, "count", True),
    "a number that was none": lambda m: setattr(m, "none", 3),
    "a device": lambda m: setattr(m, "device", torch.device("meta")),
    "an object in place of a device": lambda m: setattr(m, "device", _Object()),
    "a table in place of a number": lambda m: setattr(m, "count", {"a": 1}),
    "a new attribute": lambda m: setattr(m, "new", 1),
    "one less": lambda m: delattr(m, "count"),
    "one in place of another": lambda m: setattr(m, "other", m.__dict__.pop("count")),
    "an item": lambda m: m.numbers.append(3),
    "an item of an item": lambda m: m.series[1].append(3),
    "a member": lambda m: m.members.add(3),
    "a queue": lambda m: m.queue.append(3),
    "a tensor in place": lambda m: m.tensor.add_(1),
    "a tensor by its data": lambda m: m.tensor.data.add_(1),
    "another tensor": lambda m: setattr(m, "tensor", torch.ones(4)),
    "the same tensor": lambda m: setattr(m, "tensor", m.tensor.clone()),
    "an array": lambda m: m.array.fill(1),
    "a value of a table": lambda m: m.table.update(a=2),
    "from one table to the next": lambda m: m.of_tables["on"].update(y=m.of_tables["off"].pop("y")),
    "a key of a table": lambda m: m.table.update(d=2),
    "a table within": lambda m: m.table["b"].update(c=3),
    "another table": lambda m: setattr(m, "table", {"a": 1}),
    "the first of a table": lambda m: m.empty.update(a=1),
    "one of an order": lambda m: m.ordered.update(x=2),
    "an object's number": lambda m: setattr(m.one, "number", 2.5),
    "an object's list": lambda m: m.one.inner["a"].append(3),
    "another object": lambda m: setattr(m, "one", _Object()),
    "another class": lambda m: setattr(m.one, "__class__", types.new_class("_Other", (_Object,))),
    "an object in a list": lambda m: setattr(m.several[1], "number", 2.5),
    "another object in a list": lambda m: m.several.__setitem__(1, _Object()),
    "a slot": lambda m: setattr(m.slotted, "held", 4),
    "a default": lambda m: setattr(m.compute, "__defaults__", (3.0,)),
    "a function's attribute": lambda m: setattr(m.compute, "calls", 1),
    "a class": lambda m: setattr(_Object, "kept", _Object.kept + 7),
    "a list of tensors": lambda m: setattr(m, "tensors", [torch.zeros(2)]),
    "one of a list of tensors": lambda m: m.lists[0].add_(1),
    "a long list": lambda m: m.long.append(1),
    "an object in a long list": lambda m: m.objects.__setitem__(0, types.SimpleNamespace(number=9)),
    "a number of an object in a long list": lambda m: setattr(m.objects[0], "number", 9),
    "a hook": lambda m: m.layers[1].register_forward_hook(_Hook()),
    "a hook by name": lambda m: m.layers[1]._forward_hooks.update({7: _Hook()}),
    "another module": lambda m: m.layers.__setitem__(1, nn.Linear(2, 2)),
    "another parameter": lambda m: setattr(m.layers[1], "bias", nn.Parameter(torch.ones(2))),
    "a parameter less": lambda m: setattr(m.layers[1], "bias", None),
    "a parameter more": lambda m: setattr(m.layers[1], "more", nn.Parameter(torch.ones(2))),
    "a parameter of another name": lambda m: m.layers[1]._parameters.update(b=m.layers[1]._parameters.pop("bias")),
    "a parameter that is trained no more": lambda m: m.layers[1].bias.requires_grad_(
        not m.layers[1].bias.requires_grad
    ),
    "another table of parameters": lambda m: setattr(m.layers[1], "_parameters", dict(m.layers[0]._parameters)),
    "a module's number": lambda m: setattr(m.layers[2], "in_features", 5),
    "a forward of its own": lambda m: setattr(m.layers[2], "forward", _Hook()),
}


class _Hook:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, *args: Any) -> None:
        self.seen += 1


def _found(model: nn.Module, latest: Any) -> Any:
    return looked_at(lambda: named_modules(model), (), latest)


def _is_found_anew(again: Any, model: nn.Module) -> bool:
    anew = Held(named_modules(model))
    are_same = all(same(again.values[place], anew.values[place]) for place in anew.values if place in again.values)
    made_of = built(named_modules(model))
    are_same &= again.built.keys() == made_of.keys() and all(same(again.built[one], made_of[one]) for one in made_of)
    return [*again.values] == [*anew.values] and [*again.holders] == [*anew.holders] and are_same


@pytest.mark.parametrize("second", ["nothing", "a number", "a tensor in place", "an object's list"])
@pytest.mark.parametrize("first", _CHANGES)
def test_what_is_looked_at_again_is_what_is_found_anew(first: str, second: str, monkeypatch) -> None:
    monkeypatch.setattr(_Object, "kept", 1)
    model = _Model()
    latest = _found(model, None)
    for change in (first, second, "nothing"):
        _CHANGES[change](model)
        latest = _found(model, latest)
        assert _is_found_anew(latest, model), change


@pytest.mark.parametrize("change", ["nothing", "mode", "a number", "a device", "another tensor", "a tensor in place"])
def test_single_values_are_taken_anew_alone(change: str) -> None:
    model = _Model()
    del model.objects, model.lists  # of which it cannot be known
    latest = _found(model, None)
    _CHANGES[change](model)
    assert _found(model, latest) is latest


def test_what_was_found_is_not_changed_by_looking_again() -> None:
    model = _Model()
    memory = Memory(model, lambda batch: batch)
    before = memory._look()
    model.count, model.tensor = 2, torch.ones(3)
    after = memory._look()
    assert (before["", "count"], after["", "count"]) == (1, 2)
    assert before["", "tensor"].eq(0).all()
    assert after["", "tensor"].eq(1).all()


def test_what_is_untouched_is_put_together_once() -> None:
    """A model with adapters has thousands of places, which are asked about before and after each micro-batch."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    model.count, model.names = 1, ["a"]
    memory = Memory(model, lambda batch: batch)
    first = memory._look()
    assert memory._look() is first
    for change in (
        lambda: setattr(model, "count", 2),
        lambda: model.names.append("b"),
        lambda: model.seen.add_(1),
        lambda: setattr(model, "kept", torch.zeros(2)),
        lambda: model.kept.add_(1),
    ):
        before = memory._look()
        change()
        after = memory._look()
        assert here(before, after) != ({}, {})


@pytest.mark.parametrize("attribute", ["tensor", "one", "table"])
def test_nothing_of_a_pass_is_held_on_to(attribute: str) -> None:
    """A model may keep its activations until the next pass: not two of them."""
    model = _Model()

    def losses(batch: torch.Tensor) -> torch.Tensor:
        held = model.layers[0](batch)
        values = {"tensor": held, "one": _Object(), "table": {"a": held}}
        setattr(model, attribute, values[attribute])
        return held.sum(1)

    memory = Memory(model, losses)
    memory.ask_of(torch.ones(2, 2))
    for step in range(3):
        with memory.unmoved():
            losses(torch.ones(3, 2) * step)
            held = getattr(model, attribute)
            mark = weakref.ref(held["a"] if attribute == "table" else held)
            del held
        if step:
            with memory.unmoved():
                losses(torch.ones(3, 2))
                gc.collect()
                assert mark() is None
