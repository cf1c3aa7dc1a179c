"""What holds something besides a model's own modules: what computes losses, and modules that nobody registered."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

from hf_dp.per_example.checks.installed import OF_ALL
from hf_dp.per_example.checks.named import cells_of, is_own
from hf_dp.per_example.checks.values import OF_MODULES

# Of one series so many modules.
_ITEMS = 64


def beside(model: nn.Module, loss: Any) -> Iterator[tuple[str, Any]]:
    """What holds something besides the model's own modules, by a name: what computes losses, hooks of all modules that
    there are, and modules that these, or a module of the model, hold unregistered."""
    own = {id(module) for module in model.modules()}
    unregistered = (
        (f"{path}.{name}".lstrip("."), module)
        for path, owner in model.named_modules()
        for name, module in _modules({n: v for n, v in vars(owner).items() if n not in OF_MODULES})
    )
    for name, holder in chain(computing(loss), _hooked_to_all(), unregistered):
        if not isinstance(holder, nn.Module):
            yield name, holder
        elif not any(id(module) in own for module in holder.modules()):
            for path, module in holder.named_modules():
                yield ".".join(filter(None, (name, path))), module


def _hooked_to_all() -> Iterator[tuple[str, Any]]:
    for kind in OF_ALL:
        for number, hook in getattr(of_all, kind).items():
            by = hook if isinstance(hook, types.FunctionType) else type(getattr(hook, "__self__", hook))
            if is_own(by):
                yield from ((f"{kind}.{number}.{name}", holder) for name, holder in computing(hook))


def computing(loss: Any) -> Iterator[tuple[str, Any]]:
    """What computes losses, and modules that it, its class or its closure holds."""
    while isinstance(loss, functools.partial):
        given = {**{str(i): value for i, value in enumerate(loss.args)}, **loss.keywords}
        yield from _modules(given)
        yield "functools.partial", types.SimpleNamespace(**given)
        loss = loss.func
    owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    if owner is None:
        yield from _closure(loss)
        if isinstance(loss, types.FunctionType) and is_own(loss):
            yield loss.__qualname__, loss
        owner = None if hasattr(loss, "__code__") else loss
    if not hasattr(owner, "__dict__"):
        return
    kind = type(owner)
    yield kind.__name__, owner
    if not isinstance(owner, nn.Module):
        for name, module in _modules({**vars(kind), **vars(owner)}):
            yield f"{kind.__name__}.{name}", module
        for method in vars(kind).values():
            yield from _closure(method)


def _modules(values: dict[Any, Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, value in values.items():
        if isinstance(value, nn.Module):
            yield str(name), value
        elif isinstance(value, (list, tuple, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}[{key}]", one) for key, one in islice(items, _ITEMS) if isinstance(one, nn.Module))


def _closure(function: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, cell in cells_of(function).items() if isinstance(function, types.FunctionType) else ():
        with suppress(ValueError):  # it is empty
            yield from _modules({name: cell.cell_contents})
