"""What modules are made of while passes go through: which modules and parameters, of which classes, in training mode or
not, trained or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hf_dp.per_example.checks.held import put
from hf_dp.per_example.checks.values import NOTHING, Which, copied, copied_within

_MODULES, _PARAMETERS = "_modules", "_parameters"
_PARTS = ("training", "__class__", _MODULES, _PARAMETERS)
_Parameters = list[tuple[str, nn.Parameter | None, bool]]


def built(modules: Iterable[tuple[str, nn.Module]]) -> dict[tuple[str, Any], Any]:
    """By place, what each is made of."""
    found: dict[tuple[str, Any], Any] = {}
    for path, module in modules:
        found[path, "training"], found[path, "__class__"] = module.training, type(module)
        if inner := module._modules:
            found[path, _MODULES] = Which(dict(inner), [(name, id(one)) for name, one in inner.items()])
        if module._parameters:
            # In any order: who takes one out and puts it back has it last.
            own = _parameters(module)
            found[path, _PARAMETERS] = Which(own, frozenset((name, id(p), is_trained) for name, p, is_trained in own))
    return found


def _parameters(module: nn.Module) -> _Parameters:
    return [(name, p, p is not None and p.requires_grad) for name, p in module._parameters.items()]


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
    elif name == _PARAMETERS:
        _parametrise(owner, [] if value is NOTHING else value.again())
    elif value is not NOTHING:
        object.__setattr__(owner, name, value)


def _parametrise(owner: nn.Module, before: _Parameters) -> None:
    own = {name: p for name, p, _ in before}
    # Not by `==`, which tensors answer by their numbers.
    if own.keys() != owner._parameters.keys() or any(p is not owner._parameters[name] for name, p in own.items()):
        owner._parameters.clear()
        owner._parameters.update(own)
    for _, p, is_trained in before:
        if p is not None and p.requires_grad is not is_trained:
            p.requires_grad_(is_trained)


@contextmanager
def parametrised(holders: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Those of them that are modules have the same parameters at the end, trained or not as they were. Apart from
    `as_built`, in which a parameter that comes with the first pass stays: it is for others to refuse."""
    before = [(module, _parameters(module)) for _, module in holders if isinstance(module, nn.Module)]
    try:
        yield
    finally:
        for module, own in before:
            _parametrise(module, own)


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
