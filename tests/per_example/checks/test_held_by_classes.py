"""What classes, wrappers and hooks of all modules keep, whoever names them."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from hf_dp.per_example.checks.named import is_library, is_own
from tests.per_example.checks.test_held import refused_in_its_step
from tests.per_example.checks.test_memory import Plain


@pytest.fixture(autouse=True)
def _of_weights_that_let_something_pass() -> None:
    torch.manual_seed(0)
    for kind in (Plainly, Abstract, Dividing, Methods):
        kind.largest = 10.0


def scaled(kept: Any, x: Tensor) -> Tensor:
    kept.largest = max(kept.largest, float(x.detach().abs().max()))
    return x / kept.largest  # type: ignore[no-any-return]


class Plainly:
    largest = 10.0


class Abstract(abc.ABC):  # noqa: B024 - of another metaclass is enough
    largest = 10.0


class Dividing(torch.autograd.Function):
    largest = 10.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = scaled(Dividing, x)
        ctx.by = Dividing.largest
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / ctx.by  # type: ignore[no-any-return]


class Methods:
    largest = 10.0

    @staticmethod
    def by_name(x: Tensor) -> Tensor:
        return scaled(Methods, x)

    @classmethod
    def by_itself(cls, x: Tensor) -> Tensor:
        return scaled(cls, x)


class OfAnother:
    """Which names the one that keeps it."""

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return scaled(Plainly, x)


_LISTED = [Plainly]
_KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "a class": lambda x: scaled(Plainly, x),
    "an abstract class": lambda x: scaled(Abstract, x),
    "a class in a list": lambda x: scaled(_LISTED[0], x),
    "an autograd Function": lambda x: Dividing.apply(x),  # type: ignore[no-untyped-call]
    "a static method": lambda x: Methods.by_name(x),
    "a method of a class": lambda x: Methods.by_itself(x),
    "a class that another one names": lambda x: OfAnother.scaled(x),
}


@pytest.mark.parametrize("way", _KEPT)
def test_failure_110_what_a_class_keeps_that_no_object_is_of(way: str) -> None:
    keep, model = _KEPT[way], Plain()

    def losses(x: Tensor) -> Tensor:
        return model(keep(x)).sum(1)  # type: ignore[no-any-return]

    refused_in_its_step(model, losses, r"class .*largest", losses)


def test_failure_110_a_wrapper_that_says_it_is_of_a_library() -> None:
    model = Plain()

    def dividing(function: Any) -> Any:
        largest = 10.0

        @functools.wraps(function)
        def inner(x: Tensor) -> Tensor:
            nonlocal largest
            largest = max(largest, float(x.detach().abs().max()))
            return function(x / largest)  # type: ignore[no-any-return]

        return inner

    tanh = dividing(F.tanh)

    def losses(x: Tensor) -> Tensor:
        return model(tanh(x)).sum(1)  # type: ignore[no-any-return]

    assert not is_own(F.relu)  # type: ignore[arg-type]
    refused_in_its_step(model, losses, "largest", losses)


def test_failure_110_a_hook_of_all_modules() -> None:
    model = Plain()
    by: Any = lambda module, given, made: scaled(Plainly, made) if isinstance(module, nn.Linear) else None  # noqa: E731
    hook = register_module_forward_hook(by)
    try:
        refused_in_its_step(model, lambda x: model(x).sum(1), "largest")
    finally:
        hook.remove()


def test_failure_110_a_method_that_was_put_into_a_class_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, model = nn.Linear.forward, Plain()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, scaled(Plainly, x)))
    refused_in_its_step(model, lambda x: model(x).sum(1), "largest")


@pytest.mark.parametrize("name", ["code", "profile"])
def test_failure_110_a_folder_that_is_called_as_a_module_of_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(name, tmp_path / "__init__.py")
    assert spec is not None
    of_user = importlib.util.module_from_spec(spec)
    assert is_library.__wrapped__(name)
    monkeypatch.setitem(sys.modules, name, of_user)
    assert not is_library.__wrapped__(name)
    assert all(map(is_library.__wrapped__, ("sys", "functools", "types", "torch", "_io")))


def test_classes_that_are_made_by_a_call_are_the_users_own() -> None:
    assert is_own(dataclasses.make_dataclass("Kept", [("largest", float)]))
