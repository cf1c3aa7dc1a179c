"""What holds something that passes may change: modules, what computes losses, and what these hold in attributes."""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.data import Dataset

import hf_dp.per_example.checks.values as _values
from hf_dp.per_example.checks.named import is_own, named_in, placed
from hf_dp.per_example.checks.values import BIG, NOTHING, SERIES, Which, copied, copied_within, refill, same

Place = tuple[str, Any]
_OF_NAMES: tuple[type, ...] = (dict, types.SimpleNamespace, UserDict, UserList, ChainMap)
_OF_NAMES += (types.MethodType, types.FunctionType, functools.partial)
# What holds a function: of a class, or one whose results are kept.
_AROUND: dict[type, str] = {staticmethod: "__func__", classmethod: "__func__", property: "fget"}
_CACHED = "currsize"
_AROUND |= {functools.cached_property: "func", functools._lru_cache_wrapper: "__wrapped__"}
# Data are looked at by other means, and hold files that are open.
_NO_OBJECT = (type, nn.Module, types.BuiltinFunctionType, types.ModuleType, Dataset)
# Of one holder so many entries, of one series so many items, of one module so many holders, so deep.
ENTRIES, ITEMS = 4096, 64
_HOLDERS, _DEPTH = 256, 4
# Of one dict, which may be all data, so many numbers.
_NUMBERS = 1 << 24
_OTHER, _SCALAR, _COPIED, _HOLDER, _CLASS, _WHICH = range(6)
_roles: dict[type, int] = {}


class Held:
    """What attributes of some objects hold, and of what these hold: dicts, namespaces, and objects, classes and
    functions that are no library's (of functions what they name in functions around them and in their file).

    Args:
        roots: the objects, by name.
        unread: places of which what is held there need not be looked at.

    Attributes:
        values: copies of numbers, words, tensors, arrays, and series and sets of these, by place.
        owners: what holds them, by name.
        holders: by place, what holds others, or is what may be called: by which it is (see `Which`).
        entered: (its name, a holder, how deep it lies) of all that were looked into.
        kinds: their classes, and those that these inherit from.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], unread: Container[Place] = ()) -> None:
        self.values: dict[Place, Any] = {}
        self.owners: dict[str, Any] = dict(roots)
        self.holders: dict[Place, Which] = {}
        self._unread, self._seen = unread, set(map(id, self.owners.values()))
        self._kinds: dict[type, None] = {}
        self.entered = list[tuple[str, Any, int]]()
        for path, root in [*self.owners.items()]:
            self._enter(path, root)
        self.kinds: dict[type, None] = {}
        while found := [kind for kind in self._kinds if kind not in self.kinds]:
            for kind in dict.fromkeys(chain.from_iterable(kind.__mro__ for kind in found)):
                name = f"class {kind.__module__}.{kind.__qualname__}"
                if kind not in self.kinds and is_own(kind):
                    self.owners[name] = kind
                    self._enter(name, kind)
                # Put in a library's place.
                elif kind not in self.kinds and is_holder(forward := vars(kind).get("forward")):
                    self.owners[f"{name}.forward"] = forward
                    self._enter(f"{name}.forward", forward)
                self.kinds[kind] = None

    def _enter(self, path: str, root: Any) -> None:
        self._kinds[type(root)] = None
        todo, number = [(path, root, 0)], 0
        for path, holder, depth in todo:  # which grows
            room = _NUMBERS if isinstance(holder, dict) else math.inf
            for name, value, role in _held_by(holder):
                if role == _SCALAR:
                    self.values[path, name] = value
                    continue
                within = f"{path}.{name}" if path else str(name)
                if role in (_CLASS, _WHICH):
                    self._note_class(value)
                    if not isinstance(getattr(value, "__self__", None), Tensor):  # whose graph would be held
                        self.holders[path, name] = Which(value)
                    continue
                if role == _HOLDER:
                    self.holders[path, name] = Which(value)
                    if isinstance(value, dict) and not value:  # as most of an adapter's are
                        self.owners[within] = value
                        continue
                    items = [(within, value)]
                else:
                    is_whole = depth == 0 and isinstance(value, Tensor)
                    room -= math.prod(getattr(value, "shape", ()))
                    self.values[path, name] = copied(value) if is_whole else copied_within(value) if room > 0 else BIG
                    if not isinstance(value, SERIES):
                        continue
                    items = [(f"{within}[{i}]", item) for i, item in enumerate(islice(value, ITEMS))]
                if depth == _DEPTH or (path, name) in self._unread:
                    continue
                for inner, one in chain.from_iterable(itertools.starmap(_bound, items)):
                    if isinstance(one, type):
                        self._note_class(one)
                    elif id(one) not in self._seen and number < _HOLDERS and is_holder(one):
                        number += 1
                        self._seen.add(id(one))
                        self._kinds[type(one)] = None
                        self.owners[inner] = one
                        todo.append((inner, one, depth + 1))
        self.entered += todo

    def _note_class(self, kind: Any) -> None:
        if isinstance(kind, type) and len(self._kinds) < _HOLDERS and is_own(kind):
            self._kinds[kind] = None

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """What is held is as it was then, at the end: the same objects, with the same in them."""
        names = {path: dict(entries(owner)) for path, owner in self.owners.items()}
        items = {place: list(names[place[0]][place[1]]) for place, value in self.values.items() if _is_list(value)}
        try:
            yield
        finally:
            for path, owner in self.owners.items():
                before, now = names[path], dict(entries(owner))
                for name, _, _ in _held_by(owner) if len(before) < ENTRIES else ():
                    if name not in before:
                        put(owner, name, NOTHING)
                for name, value in before.items():
                    # What is not looked at, a file that was opened meanwhile say, stays as it is.
                    if role_of(value) and (name not in now or (now[name] is not value and role_of(now[name]))):
                        put(owner, name, value)
            for place, value in self.values.items():
                held = names[place[0]][place[1]]
                if role_of(held) != _COPIED or same(copied_within(held), value):
                    continue
                # The same items in it, where these can be given what they held.
                kept = zip(items[place], value, strict=True) if place in items else ()
                whole = type(value)([one if _is_again(one, was) else was for one, was in kept]) if kept else value
                if not refill(held, whole):
                    put(self.owners[place[0]], place[1], value)


def _bound(path: str, value: Any) -> list[tuple[str, Any]]:
    """Of a method its object and its function, which an object may have been given; of anything else itself."""
    is_method = isinstance(value, types.MethodType)
    return [(path, value.__self__), (f"{path}.__func__", value.__func__)] if is_method else [(path, value)]


def _is_list(value: Any) -> bool:
    return type(value) in (list, deque)


def _is_again(one: Any, was: Any) -> bool:
    """Whether an item of a list is, or could be made, what it was."""
    return same(copied_within(one), was) or refill(one, was)


def put(owner: Any, name: Any, value: Any) -> None:
    """Lets `owner` hold `value` by this name, or, for `NOTHING`, nothing."""
    if value is BIG:
        return
    if isinstance(value, Which):
        value = value.again(dict(entries(owner)).get(name))
    if isinstance(owner, dict):
        if value is NOTHING:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif isinstance(owner, types.FunctionType):
        found = (where for label, where, _ in placed(owner) if label == name)
        where = next(found, {} if "." in name else owner.__globals__)
        if isinstance(where, types.CellType) and value is NOTHING:
            with suppress(ValueError):  # it is empty
                del where.cell_contents
        elif isinstance(where, types.CellType):
            where.cell_contents = value
        elif isinstance(where, int):
            defaults = owner.__defaults__ or ()
            own = () if value is NOTHING else (value,)
            owner.__defaults__ = (*defaults[:where], *own, *defaults[where + 1 :])
        else:
            put(where, name.rpartition(".")[2], value)
    elif isinstance(owner, functools._lru_cache_wrapper) and name == _CACHED:
        if value is NOTHING or value < owner.cache_info().currsize:  # what it holds cannot be taken out by itself
            owner.cache_clear()
    elif isinstance(owner, functools.partial):
        args = [value if str(i) == name else one for i, one in enumerate(owner.args)]
        cast("Any", owner).__setstate__((owner.func, tuple(args), owner.keywords, vars(owner)))
    elif value is not NOTHING:
        # Past the `__setattr__` of what is frozen, and that of modules, which registers.
        (setattr if isinstance(owner, type) else object.__setattr__)(owner, name, value)
    else:
        with suppress(AttributeError):
            (delattr if isinstance(owner, type) else object.__delattr__)(owner, name)


def _held_by(holder: Any) -> list[tuple[Any, Any, int]]:
    """What it holds, of what is looked at, by name; and in which way each is."""
    found = []
    for name, value in entries(holder):
        role = _roles.get(type(value))
        if role is None:
            role = role_of(value)
        if role and (name not in _values.OF_MODULES or (_values.are_hooks(name) and value)):
            found.append((name, value, role))
    return found


def entries(holder: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(holder, dict):
        return holder.items() if len(holder) <= ENTRIES else islice(holder.items(), ENTRIES)
    if isinstance(holder, nn.Module):
        return vars(holder).items()
    if isinstance(holder, type):
        return [
            (name, value) for name, value in vars(holder).items() if not name.startswith("__") or _runs(name, value)
        ]
    if isinstance(holder, types.FunctionType):
        return named_in(holder)
    if (inner := _AROUND.get(type(holder))) is not None:
        wrapped = getattr(holder, inner)
        is_cache = isinstance(holder, functools._lru_cache_wrapper) and is_holder(wrapped)
        return [(inner, wrapped), *([(_CACHED, holder.cache_info().currsize)] if is_cache else ())]
    if isinstance(holder, functools.partial):
        return [
            ("func", holder.func),
            *((str(i), one) for i, one in enumerate(holder.args)),
            ("keywords", holder.keywords),
        ]
    own = vars(holder).items() if hasattr(holder, "__dict__") else ()
    if slots := _slots(cast("Any", type(holder))):
        return [*own, *((name, getattr(holder, name)) for name in slots if hasattr(holder, name))]
    return own


def _runs(name: str, value: Any) -> bool:
    """Whether a special method of a class may run in a pass, as `__call__` and `__getitem__` may."""
    return isinstance(value, types.FunctionType) and name not in ("__init__", "__new__", "__repr__", "__del__")


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for one in filter(is_own, kind.__mro__):
        slots = vars(one).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in found if not name.startswith("__"))


def role_of(value: Any) -> int:
    role = _roles.get(type(value))
    if role is None:
        role = _roles[type(value)] = _role(type(value))
    return role


def is_value(value: Any) -> bool:
    """Whether it is a number, words, a tensor, an array, or a series or set of these."""
    return role_of(value) in (_SCALAR, _COPIED)


def is_scalar(value: Any) -> bool:
    return role_of(value) == _SCALAR


def is_holder(value: Any) -> bool:
    return role_of(value) == _HOLDER and (not isinstance(value, types.FunctionType) or is_own(value))


def _role(kind: type) -> int:
    if issubclass(kind, _values.SCALARS):
        return _SCALAR
    if issubclass(kind, _values.COPIED):
        # A list of a class of its own cannot be made again.
        return _OTHER if issubclass(kind, (list, deque, set, frozenset)) and kind not in _values.COPIED else _COPIED
    if issubclass(kind, type):
        return _CLASS
    if issubclass(kind, _values.UNSEEN_WITHIN):
        return _WHICH
    is_object = kind in _AROUND or (is_own(kind) and not issubclass(kind, _NO_OBJECT))
    return _HOLDER if is_object or issubclass(kind, _OF_NAMES) else _OTHER
