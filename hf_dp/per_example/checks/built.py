"""What modules are made of while passes go through: which modules, of which classes, in training mode or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_dp.per_example.checks.held import put
from hf_dp.per_example.checks.values import NOTHING, Which, copied, copied_within

_MODULES = "_modules"
_PARTS = ("training", "__class__", _MODULES)


def built(modules: Iterable[tuple[str, nn.Module]]) -> dict[tuple[str, Any], Any]:
    """By place, what each is made of."""
    found: dict[tuple[str, Any], Any] = {}
    for path, module in modules:
        found[path, "training"], found[path, "__class__"] = module.training, type(module)
        if inner := module._modules:
            found[path, _MODULES] = Which(dict(inner), [(name, id(one)) for name, one in inner.items()])
    return found


def put_in(owner: Any, name: Any, value: Any) -> None:
    """Lets it be made of it, hold it as a buffer, or as an attribute or what else; for `NOTHING` no more."""
    if owner is None:
        return
    buffers = owner._buffers if isinstance(owner, nn.Module) else {}
    if name in buffers and value is NOTHING:
        buffers.pop(name)
    elif name in buffers or (isinstance(owner, nn.Module) and name in owner._non_persistent_buffers_set):
        owner._buffers[name] = copied(value)
    elif isinstance(owner, nn.Module) and name in _PARTS:
        _build(owner, name, value)
    else:
        put(owner, name, copied_within(value))


def _build(owner: nn.Module, name: str, value: Any) -> None:
    if name == _MODULES:
        inner = {} if value is NOTHING else dict(value.again())
        owner._modules.clear()
        owner._modules.update(inner)
    elif value is not NOTHING:
        object.__setattr__(owner, name, value)


@contextmanager
def as_built(holders: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Those of them that are modules are made of the same at the end."""
    modules = [holder for _, holder in holders if isinstance(holder, nn.Module)]
    before = [(module.training, type(module), dict(module._modules)) for module in modules]
    try:
        yield
    finally:
        for module, (training, kind, inner) in zip(modules, before, strict=True):
            if module.training is not training:
                module.training = training
            if type(module) is not kind:
                object.__setattr__(module, "__class__", kind)
            if module._modules != inner:
                module._modules.clear()
                module._modules.update(inner)
