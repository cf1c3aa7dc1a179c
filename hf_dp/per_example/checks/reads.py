"""Which values losses read, of those that attributes hold: these are to be what they were when all was checked."""

from __future__ import annotations

import argparse
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from itertools import islice
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from hf_dp.per_example.checks.held import entries, is_holder, is_value
from hf_dp.per_example.checks.memory import told_of, write_of
from hf_dp.per_example.checks.named import is_own
from hf_dp.per_example.checks.switches import is_on, switches_of
from hf_dp.per_example.checks.values import BIG, NOTHING, OF_MODULES, SERIES, copied_within, same
from hf_dp.per_example.modules import named_modules
from hf_dp.per_example.watched import WatchedParameter

# Of a run of hf_dp, which is no object of a user's.
_STEP = "global_step"
# Lists that a recurrent layer has of its own parameters, which are looked at as such: training moves them.
_OF_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})
_MOST, _ITEMS, _DEPTH = 8192, 64, 4
_SETTINGS = (argparse.Namespace, types.SimpleNamespace, lr_scheduler.LRScheduler)


class Reads:
    """What a pass has read.

    Attributes:
        owners: what holds values, by name.
        names: those of attributes that were read, by the owner's.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self.owners, todo = dict(owners), list(owners.items())
        self.names: dict[str, set[str]] = {}
        seen = set(map(id, self.owners.values()))
        for path, owner in todo:  # which grows
            for name, value in entries(owner):
                inner = f"{path}.{name}".lstrip(".")
                for number, one in enumerate(_within(value) if id(value) not in seen and len(todo) < _MOST else ()):
                    if id(one) not in seen:
                        seen |= {id(value), id(one)}
                        self.owners[at := f"{inner}[{number}]" if number else inner] = one
                        todo.append((at, one))
        self.names |= {path: set() for path in self.owners if path not in self.names}

    def places(self) -> Iterator[tuple[str, Any, Any]]:
        """(the owner's name, the owner, the name of a value) of all that was read, or may have been."""
        anywhere = set().union(*self.names.values())
        for path, owner in self.owners.items():
            if path.rpartition(".")[2] in OF_MODULES:
                continue
            if isinstance(owner, type):  # read through its objects
                own = {name for name, _ in entries(owner)}  # and what it may get yet, in place of one that it inherits
                names: Any = sorted(name for name in anywhere if name in own or not name.startswith("__"))
            elif isinstance(owner, (dict, types.FunctionType)):  # nobody sees it
                names = [name for name, _ in entries(owner)] if self._is_reached(path) else []
            elif "__dict__" in self.names[path] and _are_settings(owner):
                names = sorted({*self.names[path], *vars(owner)})
            else:
                names = sorted(self.names[path])
            yield from ((path, owner, name) for name in names)

    def _is_reached(self, path: str) -> bool:
        """Whether what holds a dict was read, as far as its name tells."""
        if not isinstance(self.owners[path], dict):
            return True
        holder, _, name = path.rpartition(".")
        return (
            holder not in self.names
            or isinstance(self.owners[holder], (dict, types.FunctionType, type))
            or (name.partition("[")[0] in self.names[holder])
        )


def _within(value: Any, depth: int = 0) -> list[Any]:
    """What holds settings, and how far a training is."""
    try:
        return _parts(value, depth)
    except Exception:  # noqa: BLE001 - of another's code: a proxy of nothing raises whatever is asked of it
        return []


def _parts(value: Any, depth: int) -> list[Any]:
    if isinstance(value, Optimizer):
        return list(value.param_groups)
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    if isinstance(value, SERIES):
        items = islice(value, _ITEMS if depth < _DEPTH else 0)
        return [one for item in items for one in _within(item, depth + 1)]
    if isinstance(value, type):
        return _classes(value)
    if type(value).__module__.startswith("hf_dp"):
        return [value] if hasattr(type(value), _STEP) else []
    if isinstance(value, types.MethodType):
        return [*_within(value.__self__), *_within(value.__func__)]
    return [value, *_classes(type(value))] if _are_settings(value) or is_holder(value) else []


def _are_settings(value: Any) -> bool:
    return is_dataclass(value) or isinstance(value, _SETTINGS) or hasattr(value, "model_type")


def _classes(kind: type) -> list[Any]:
    """A class, and those that it has attributes of, as far as they are a user's."""
    return [one for one in (*kind.__mro__, type(kind)) if is_own(one)]


@contextmanager
def reads_of(owners: Mapping[str, Any]) -> Iterator[Reads]:
    """Notes which attributes of `owners`, and of the settings that these hold, are read inside."""
    found = Reads(owners)
    paths = {id(owner): path for path, owner in found.owners.items()}
    kinds = {nn.Module if isinstance(owner, nn.Module) else type(owner): None for owner in found.owners.values()}
    with ExitStack() as stack:
        for kind in kinds:
            try:
                stack.enter_context(_noting(kind, paths, found.names))
            except (AttributeError, TypeError):  # a class of C's, of whose objects all may have been read
                own = {path: owner for path, owner in found.owners.items() if type(owner) is kind}
                found.names.update({path: {str(name) for name, _ in entries(owner)} for path, owner in own.items()})
        yield found


@contextmanager
def _noting(kind: Any, paths: Mapping[int, str], names: Mapping[str, set[str]]) -> Iterator[None]:
    own, inherited = vars(kind).get("__getattribute__"), kind.__getattribute__

    def get(self: Any, name: str) -> Any:
        if (path := paths.get(id(self))) is not None:
            names[path].add(name)
        return inherited(self, name)

    kind.__getattribute__ = get
    try:
        yield
    finally:
        if own is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = own


class AsRead:
    """The values that losses read, as they are; what of the model is frozen, and which modules are in training mode.

    Args:
        model: of which trainable weights are what a training changes.
        reads: of a pass.
    """

    def __init__(self, model: nn.Module, reads: Reads) -> None:
        self._model, own = model, {id(module) for _, module in named_modules(model)}
        self._watched: list[tuple[str, Callable[[], Any], bool]] = []
        for path, owner, name in reads.places():
            if (get := _getter(owner, name)) is not None:
                is_own = not isinstance(owner, nn.Module) or id(owner) in own
                self._watched.append((f"{path}.{name}".lstrip("."), get, is_own))
        self._switches, self._known = switches_of(model), list[_Known]()
        self.note()

    def note(self) -> None:
        """They are what they are to be."""
        before: list[_Known | None] = [*self._known] or [None] * len(self._watched)
        now = [(get(), with_tensors) for _, get, with_tensors in self._watched]
        self._known = [
            known if known is not None and known.stays(value) else _Known(value, with_tensors)
            for (value, with_tensors), known in zip(now, before, strict=True)
        ]
        self._before = self._marks()

    def changed(self) -> str | None:
        """The name of one that is another now, or of one that draws for all examples and is on now."""
        if on := next((switch for switch in self._switches if is_on(*switch)), None):
            return f"{type(on[0]).__name__}.{on[1]}"
        values = zip(self._watched, self._known, strict=True)
        found = next((name for (name, get, _), known in values if not known.is_still(get())), None)
        if found is None and (marks := self._marks()) != self._before:
            found = next(n for n in {**marks, **self._before} if marks.get(n) != self._before.get(n)).strip(" .")
        return found

    def _marks(self) -> dict[str, Any]:
        # No tuples, of which there would be thousands for Python to look through for garbage.
        found: dict[str, Any] = {}
        for path, module in named_modules(self._model):
            found[f"{path}.training"] = module.training
            for last, p in module._parameters.items():
                if p is not None and not p.requires_grad:
                    found[f"{path}.{last}"], found[f"{path}.{last} "] = id(p), write_of(p)
        return found


class _Known:
    """A value, as far as it is told from others: numbers by what they are, objects by which they are."""

    def __init__(self, value: Any, with_tensors: bool) -> None:
        self._is_told = with_tensors or not isinstance(value, Tensor)
        self._value = value if not self._is_told or isinstance(value, Tensor) else _copied(value)
        self._count = _writes(value) if isinstance(value, Tensor) else 0
        self._sum = told_of(value) if isinstance(value, Tensor) and self._is_told else None

    def is_still(self, now: Any) -> bool:
        if not self._is_told:
            return True
        if not isinstance(now, Tensor) or not isinstance(self._value, Tensor):
            return _is_same(now, self._value)
        return self.is_very(now) or told_of(now) == self._sum

    def stays(self, now: Any) -> bool:
        """Whether it need not be noted again."""
        return self.is_very(now) if isinstance(now, Tensor) else self._is_told and _is_same(now, self._value)

    def is_very(self, now: Any) -> bool:
        """Whether it is the very tensor, not written to since."""
        return isinstance(now, Tensor) and now is self._value and _writes(now) == self._count


def _writes(tensor: Tensor) -> int:
    # What a pass has computed of weights may lie in their memory, which training writes to.
    return 0 if isinstance(tensor, WatchedParameter) or tensor.is_inference() else tensor._version


def _copied(value: Any, depth: int = 0) -> Any:
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType(_copied(dict(value), depth))
    if isinstance(value, dict):
        is_small = len(value) < _ITEMS and depth < _DEPTH  # it may hold itself
        return {name: _copied(item, depth + 1) for name, item in value.items()} if is_small else value
    copy = copied_within(value) if is_value(value) else value
    # What is too large to be copied is at least known by which it is.
    return value if copy is BIG else copy


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, types.MappingProxyType) and isinstance(before, types.MappingProxyType):
        return _is_same(dict(now), dict(before))
    if isinstance(now, dict) and isinstance(before, dict):
        return now.keys() == before.keys() and all(_is_same(now[name], before[name]) for name in now)
    if type(now) is type(before) is functools.partial:  # checkpointing that was switched off and on has another one
        return all(_is_same(*two) for two in zip(_of_partial(now), _of_partial(before), strict=True))
    if is_value(now) and is_value(before):
        return same(now, before)
    return isinstance(now, types.MethodType) and bool(now == before)


def _of_partial(value: functools.partial[Any]) -> tuple[Any, dict[int, Any], dict[str, Any]]:
    """Its function, and what it is called with, by place and by name."""
    return value.func, dict(enumerate(value.args)), value.keywords


def _getter(owner: Any, name: Any) -> Callable[[], Any] | None:
    """What gives an attribute's value, or `NOTHING`; None of what is no value of an object of its own."""
    if isinstance(owner, dict):
        return lambda: owner.get(name, NOTHING)
    if isinstance(owner, types.FunctionType):
        return lambda: dict(entries(owner)).get(name, NOTHING)
    if isinstance(owner, type):
        return lambda: vars(owner).get(name, NOTHING)
    if isinstance(owner, nn.Module):
        is_inherited = hasattr(nn.Module, name) and name not in vars(owner)  # looked at by other means, or no value
        is_weight = name in owner._parameters or (isinstance(owner, nn.RNNBase) and name in _OF_RECURRENT)
        if name in OF_MODULES or name in owner._modules or is_inherited or is_weight:
            return None
        if name in owner._buffers:
            return lambda: owner._buffers.get(name, NOTHING)
    if name == _STEP and type(owner).__module__.startswith("hf_dp"):
        return lambda: getattr(owner, name)
    if not hasattr(owner, "__dict__") or isinstance(owner, functools.partial):
        return lambda: dict(entries(owner)).get(name, NOTHING)
    # Also of what its class has: it may get one of its own.
    return None if name.startswith("__") else functools.partial(_attribute, owner, name)


def _attribute(owner: Any, name: str) -> Any:
    """What an object holds by this name, or gives by it where its class looks it up by another, say."""
    own, kind = vars(owner), cast("Any", type(owner))
    if name in own or isinstance(owner, nn.Module):
        return own.get(name, NOTHING)
    if kind.__getattribute__ is object.__getattribute__ and not hasattr(kind, "__getattr__"):
        return NOTHING
    try:
        value = getattr(owner, name, NOTHING)
    except Exception:  # noqa: BLE001 - of another's code
        return NOTHING
    return value if is_value(value) else NOTHING
