"""What is held, looked at again: nearly always the very same is held by the very same holders, of which a model with
adapters has thousands."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Container, Sequence
from itertools import chain, islice, repeat
from typing import Any

from torch import Tensor, nn

from hf_dp.per_example.checks.built import built
from hf_dp.per_example.checks.held import ENTRIES, ITEMS, Held, Place, entries, is_holder, is_scalar, is_value, role_of
from hf_dp.per_example.checks.values import BIG, NOTHING, OF_MODULES, SERIES, are_hooks, copied, copied_within, same

# In place of what is not held on to here: of a pass it may be the whole graph.
_LET_GO = object()
_NAMES = frozenset({str, int})


def looked_at(roots: Callable[[], Sequence[tuple[str, Any]]], unread: Container[Place], latest: Again | None) -> Again:
    """What these hold now (see `Held`): the `latest` that was found, if no more than single values are others."""
    if latest is not None and latest.is_untouched():
        return latest
    now = roots()
    return latest if latest is not None and latest.is_so_still(now) else Again(now, unread)


class Again:
    """What some objects hold, and what tells whether they hold it still.

    Args:
        roots: as of `Held`, as is `unread`.

    Attributes:
        values: as of `Held`, as are `holders`.
        modules: those of the roots that are such, by name.
        built: what they are made of.
        buffers: where these are, and of which module.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], unread: Container[Place]) -> None:
        held = Held(roots, unread)
        self.values, self.holders = held.values, held.holders
        self._names, self._roots = _apart(roots)
        self._forwards = [(kind, vars(kind).get("forward")) for kind in held.kinds]
        # That are looked at as soon as there is something in them.
        self._empty = list[dict[Any, Any]]()
        self._entered = [self._note(*one) for one in held.entered]
        self.modules = [(path, root) for path, root in roots if isinstance(root, nn.Module)]
        self._in_tables = [one for one in self._entered if _is_table(one[1])]
        self._others = [one for one in self._entered if not _is_table(one[1])]
        self._between, self._joined = dict[Place, Any](), dict[Place, Any]()
        self._remember()

    def _remember(self) -> None:
        """Takes note of what is asked of all holders at once, which takes less time than of one after another."""
        self._attributes = [vars(module) for _, module in self.modules]
        inner: list[dict[str, Any]] = [module._modules for _, module in self.modules]
        inner += [module._parameters for _, module in self.modules]
        self._tables = [*(_own(one[1]) for one in self._in_tables), *inner]
        known = chain.from_iterable(one[-1] for one in self._in_tables)
        self._known = [*known, *chain.from_iterable(map(dict.values, inner))]
        self._kept = sum(map(operator.is_not, self._known, repeat(_LET_GO)))
        self._named = [*self._tables, *(module._buffers for _, module in self.modules)]
        self.buffers = [((path, name), module) for path, module in self.modules for name in module._buffers]
        self._keys = [*chain.from_iterable(self._named)]
        # Such names are one where they are equal, and lists of them are compared the fastest.
        self._are_plain = _NAMES.issuperset(map(type, self._keys))
        self._let_go = [
            (path, name, _own(holder), depth)
            for path, holder, depth, _, names, values in self._in_tables
            for name, value in zip(names, values, strict=True)
            if value is _LET_GO
        ]
        # What one loses and the next one gets stands in the same place among all.
        self._lengths = [*map(len, self._named)]
        self._types = [type(module) for _, module in self.modules]
        self._parameters = [p for _, module in self.modules for p in module._parameters.values() if p is not None]
        self._trained = [p.requires_grad for p in self._parameters]
        self.built = built(self.modules)
        self._joined = {}

    def is_untouched(self) -> bool:
        """Whether all hold the very same by the same names, but for tensors and series, of which `values` are those of
        now. If not, more of them may hold what they held."""
        if [*map(len, self._named)] != self._lengths:
            return False
        keys, attributes = [*chain.from_iterable(self._named)], [vars(module) for _, module in self.modules]
        are_named_so = keys == self._keys if self._are_plain else all(map(operator.is_, keys, self._keys))
        if not are_named_so or not all(map(operator.is_, attributes, self._attributes)):
            return False
        # What is let go is none of those that are held on to.
        now, types = chain.from_iterable(map(dict.values, self._tables)), [type(module) for _, module in self.modules]
        is_held = types == self._types and sum(map(operator.is_, now, self._known)) == self._kept
        if not is_held or [p.requires_grad for p in self._parameters] != self._trained:
            return False
        if not self._are_so_still(self._others):
            return False
        return all(self._is_let_go_still(path, name, own[name], depth) for path, name, own, depth in self._let_go)

    def joined(self, first: dict[Place, Any], last: dict[Place, Any]) -> dict[Place, Any]:
        """All that was found, between these: the very same as the last time where none of it is another."""
        both = {**first, **last}
        is_so_still = both.keys() == self._between.keys() and all(self._between[at] is one for at, one in both.items())
        if not self._joined or not is_so_still:
            self._between, self._joined = both, {**first, **self.holders, **self.values, **self.built, **last}
        return self._joined

    def _note(self, path: str, holder: Any, depth: int) -> tuple[str, Any, int, type, list[Any], list[Any]]:
        names, values = list[Any](), list[Any]()
        for name, value in _own(holder).items():
            if isinstance(value, dict) and not value and (name not in OF_MODULES or are_hooks(name)):
                self._empty.append(value)
            is_let_go = name not in OF_MODULES and (not role_of(value) or (is_value(value) and not is_scalar(value)))
            names.append(name)
            values.append(_LET_GO if is_let_go else value)
        return path, holder, depth, type(holder), names, values

    def is_so_still(self, roots: Sequence[tuple[str, Any]]) -> bool:
        """Whether these hold what they held, but for numbers, words and tensors of modules, of which `values` are those
        of now. If not, all is to be looked at anew."""
        names, now = _apart(roots)
        if names != self._names or len(now) != len(self._roots) or not all(map(operator.is_, now, self._roots)):
            return False
        if not self._are_so_still(self._entered):
            return False
        self._remember()
        return True

    def _are_so_still(self, entered: Sequence[tuple[str, Any, int, type, list[Any], list[Any]]]) -> bool:
        if any(self._empty) or any(vars(kind).get("forward") is not was for kind, was in self._forwards):
            return False
        return all(self._is_still(*one) for one in entered)

    def _is_still(self, path: str, holder: Any, depth: int, kind: type, names: list[Any], values: list[Any]) -> bool:
        own = _own(holder)
        if type(holder) is not kind or len(own) != len(names) or not all(map(operator.is_, own, names)):
            return False
        if all(map(operator.is_, own.values(), values)):
            return True
        for i, (name, value) in enumerate(own.items()):
            was = values[i]
            if value is was:
                continue
            if name in OF_MODULES and not are_hooks(name):
                values[i] = value
                continue
            if is_scalar(value) and is_scalar(was):
                self.values[path, name] = values[i] = value
                self._joined = {}
            elif was is not _LET_GO or not self._is_let_go_still(path, name, value, depth):
                return False
        return True

    def _is_let_go_still(self, path: str, name: Any, value: Any, depth: int) -> bool:
        """Whether what is not held on to is what it was; or a tensor, of which `values` are then those of now."""
        known = self.values.get((path, name), NOTHING)
        if known is NOTHING:
            return not role_of(value)
        if not is_value(value) or is_scalar(value) or not _is_same(value, known):
            return False
        if isinstance(value, Tensor) and known is not BIG:
            # Whether it is another is asked of the device once, of those before and after a step.
            self.values[path, name] = copied_within(value) if depth else copied(value)
            self._joined = {}
        return True


def _is_same(value: Any, known: Any) -> bool:
    """Whether nothing but a tensor is another than was copied, as far as no device is asked."""
    if isinstance(value, Tensor) or isinstance(known, Tensor):
        return known is BIG or (isinstance(value, Tensor) and isinstance(known, Tensor))
    if known is BIG:  # the first items of a series are looked at by themselves
        return not (isinstance(value, SERIES) and any(map(is_holder, islice(value, ITEMS))))
    return not _has_tensors(known) and same(value, known)


def _has_tensors(known: Any) -> bool:
    return isinstance(known, Tensor) or (isinstance(known, SERIES) and any(map(_has_tensors, known)))


def _is_table(holder: Any) -> bool:
    return isinstance(holder, nn.Module) or (isinstance(holder, dict) and len(holder) <= ENTRIES)


def _own(holder: Any) -> dict[Any, Any]:
    if isinstance(holder, nn.Module):
        return vars(holder)
    if _is_table(holder):
        return holder  # type: ignore[no-any-return]
    # Names of what functions hold are made anew each time.
    return {sys.intern(name) if type(name) is str else name: value for name, value in entries(holder)}


def _apart(roots: Sequence[tuple[str, Any]]) -> tuple[list[str], list[Any]]:
    # Not by `zip(*roots)`, which makes an iterator for each of thousands.
    return [name for name, _ in roots], [holder for _, holder in roots]
