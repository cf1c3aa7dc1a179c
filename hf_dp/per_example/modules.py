"""The modules of a model and their parameters, of which there are thousands: each is looked at once.

The methods of these names hand on each module through all that it lies in, and a step asks several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from hf_dp.errors import ConfigurationError

_CHECKPOINTED = "_checkpoint_wrapped_module."


def named_modules(model: nn.Module, *, by_each_name: bool = False) -> list[tuple[str, nn.Module]]:
    """As of the method of this name; if `by_each_name`, one that lies in several comes as often."""
    found, known = [("", model)], {id(model)}
    try:
        _walk("", model._modules, found, None if by_each_name else known)
    except RecursionError:  # as deep as torch's own walk comes
        raise RecursionError(f"modules lie in one another without end: {found[-1][0][:60]}...") from None
    return found


def _walk(
    begin: str, inner: Mapping[str, nn.Module | None], found: list[tuple[str, nn.Module]], known: set[int] | None
) -> None:
    """Adds what lies `inner` to `found`, but what is `known`, by its identity."""
    # No function within the other, which would know itself: a cycle, that keeps all modules until it is searched for.
    for name, module in inner.items():
        if module is None:
            continue
        if known is not None:
            if id(module) in known:
                continue
            known.add(id(module))
        found.append((begin + name, module))
        if module._modules:  # as most have not
            _walk(f"{begin}{name}.", module._modules, found, known)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """As of the method of this name: tied names collapse to the first."""
    return dict(_first_named(_named_parameters(named_modules(model))))


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """As of `parameters`."""
    return [*named_parameters(model).values()]


def trained_in(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Parameter]:
    """The trainable parameters of all modules of a model, by their names; tied names collapse to the first."""
    with torch._C.DisableTorchFunction():  # of a check's modes, each would be asked for each attribute
        return dict(_first_named((name, p) for name, p in _named_parameters(modules) if p.requires_grad))


def names_in(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, frozenset[str]]:
    """Of each trainable parameter of all modules of a model, by its first name, all that it has."""
    names: dict[int, list[str]] = {}
    for name, p in _named_parameters(modules):
        if p.requires_grad:
            names.setdefault(id(p), []).append(name)
    return {group[0]: frozenset(map(plain_name, group)) for group in names.values()}


def plain_name(name: str) -> str:
    """A parameter's name without what accelerate's activation checkpointing puts into it."""
    return name.replace(_CHECKPOINTED, "")


def _named_parameters(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    for path, module in modules:
        if own := module._parameters:
            begin = f"{path}." if path else ""
            for last, p in own.items():
                if p is not None:
                    yield begin + last, p


def _first_named(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    found = set[int]()
    for name, p in named:
        if id(p) not in found:
            found.add(id(p))
            yield name, p


def refuse_no_numbers(named: Mapping[str, nn.Parameter]) -> None:
    """Refuses parameters on torch's meta device (`ConfigurationError`)."""
    if found := sorted(name for name, p in named.items() if p.is_meta):
        raise ConfigurationError(
            f"{found[0]} is on torch's meta device ({len(found)} of {len(named)} parameters are): it holds no numbers.",
            why="it was offloaded (to memory or disk, by a device_map), and is exchanged in each pass, or was never "
            "loaded: neither its gradients nor whether it stays as it is can be seen.",
            fix="load all of the model onto one device, in fewer bits if it is too large (docs/choosing.md), or shard "
            "it with FSDP2 (docs/scaling.md).",
        )
