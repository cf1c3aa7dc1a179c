"""What functions name: in functions around them, in their file and in others, in their defaults; and whose they are."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

# Their objects are looked at by other means, or are none of what a user's own loss writes.
_LIBRARIES = {"hf_dp", "torch", "transformers", "peft", "accelerate", "trl", "datasets", "tokenizers", "numpy"}


def named_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function names, and what is its own."""
    return ((label, value) for label, _, value in placed(function))


def placed(function: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """(a label, what holds it by the last part of that, the value) of what a function names: in functions around it, in
    its file, and in modules that are no library's, which it may import itself; and of its attributes and defaults."""
    cells, names = cells_of(function), names_in(function.__code__)
    for name in names:
        if name in cells:
            with suppress(ValueError):  # it is empty
                yield name, cells[name], (value := cells[name].cell_contents)
                yield from _in_module(name, value, names)
        elif not name.startswith("__"):
            if name in function.__globals__:
                yield name, function.__globals__, function.__globals__[name]
            yield from _in_module(name, function.__globals__.get(name, sys.modules.get(name)), names)
    yield "__dict__", {}, vars(function)
    if keywords := function.__kwdefaults__:
        yield "__kwdefaults__", {}, keywords
    defaults, code = function.__defaults__ or (), function.__code__
    given = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from ((f"{name} by default", i, value) for i, (name, value) in enumerate(zip(given, defaults, strict=True)))


def _in_module(path: str, module: Any, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(module, types.ModuleType) or is_library(module.__name__.partition(".")[0]):
        return
    for name in names:
        if name in vars(module) and not name.startswith("__"):
            value = vars(module)[name]
            if not isinstance(value, types.ModuleType):
                yield f"{path}.{name}", vars(module), value
            elif value.__name__.startswith(f"{module.__name__}."):
                yield from _in_module(f"{path}.{name}", value, names)


def cells_of(function: Any) -> dict[str, Any]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


@functools.cache
def names_in(code: types.CodeType) -> tuple[str, ...]:
    inner = [names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return tuple(dict.fromkeys(chain(code.co_freevars, code.co_names, *inner)))


def is_own(kind: type | types.FunctionType) -> bool:
    """Whether it is a class or a function of the user's, or of what is not known to hold nothing."""
    modules = [kind.__module__ or ""]
    if isinstance(kind, types.FunctionType):  # a wrapper says that it is of the module of what it wraps
        modules.append(str(kind.__globals__.get("__name__")))
    elif modules == ["types"] and getattr(types, kind.__name__, None) is not kind:  # as `make_dataclass` makes them
        return True
    return not all(is_library(module.partition(".")[0]) for module in modules)


@functools.cache
def is_library(root: str) -> bool:
    file = getattr(sys.modules.get(root), "__file__", None)
    place = Path(file or "")
    # A project may have a folder of one of its names (code, test, profile).
    is_pythons = root in sys.stdlib_module_names and (not file or place.is_relative_to(Path(os.__file__).parent))
    # What is installed keeps files, threads and caches, which cannot be put back by halves.
    return root in _LIBRARIES or is_pythons or not {"site-packages", "dist-packages"}.isdisjoint(place.parts)
