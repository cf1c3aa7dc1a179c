"""What is held, looked at again: nearly always the very same is held by the very same holders, of which a model with
adapters has thousands."""

from __future__ import annotations

import operator
import sys
from collections.abc import Container, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from hf_dp.per_example.checks.held import ENTRIES, ITEMS, Held, Place, entries, is_holder, is_scalar, is_value, role_of
from hf_dp.per_example.checks.values import BIG, NOTHING, OF_MODULES, SERIES, are_hooks, copied, copied_within, same

# In place of what is not held on to here: of a pass it may be the whole graph.
_LET_GO = object()


def looked_at(roots: Sequence[tuple[str, Any]], unread: Container[Place], latest: Again | None) -> Again:
    """What these hold now (see `Held`): the `latest` that was found, if no more than single values are others."""
    return latest if latest is not None and latest.is_so_still(roots) else Again(roots, unread)


class Again:
    """What some objects hold, and what tells whether they hold it still.

    Args:
        roots: as of `Held`, as is `unread`.

    Attributes:
        values: as of `Held`, as are `holders`.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], unread: Container[Place]) -> None:
        held = Held(roots, unread)
        self.values, self.holders = held.values, held.holders
        self._names, self._roots = _apart(roots)
        self._forwards = [(kind, vars(kind).get("forward")) for kind in held.kinds]
        # That are looked at as soon as there is something in them.
        self._empty = list[dict[Any, Any]]()
        self._entered = [self._note(*one) for one in held.entered]

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
        if any(self._empty) or any(vars(kind).get("forward") is not was for kind, was in self._forwards):
            return False
        return all(self._is_still(*one) for one in self._entered)

    def _is_still(self, path: str, holder: Any, depth: int, kind: type, names: list[Any], values: list[Any]) -> bool:
        own = _own(holder)
        if type(holder) is not kind or len(own) != len(names) or not all(map(operator.is_, own, names)):
            return False
        if all(map(operator.is_, own.values(), values)):
            return True
        for i, (name, value) in enumerate(own.items()):
            was = values[i]
            if value is was or (name in OF_MODULES and not are_hooks(name)):
                continue
            known = self.values.get((path, name), NOTHING)
            if was is _LET_GO and not role_of(value) and known is NOTHING:
                continue
            if is_scalar(value) and is_scalar(was):
                self.values[path, name] = values[i] = value
                continue
            is_copy = was is _LET_GO and known is not NOTHING and is_value(value) and not is_scalar(value)
            if not is_copy or not _is_same(value, known):
                return False
            if isinstance(value, Tensor) and known is not BIG:
                # Whether it is another is asked of the device once, of those before and after a step.
                self.values[path, name] = copied_within(value) if depth else copied(value)
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


def _own(holder: Any) -> dict[Any, Any]:
    if isinstance(holder, nn.Module):
        return vars(holder)
    if isinstance(holder, dict) and len(holder) <= ENTRIES:
        return holder
    # Names of what functions hold are made anew each time.
    return {sys.intern(name) if type(name) is str else name: value for name, value in entries(holder)}


def _apart(roots: Sequence[tuple[str, Any]]) -> tuple[list[str], list[Any]]:
    # Not by `zip(*roots)`, which makes an iterator for each of thousands.
    return [name for name, _ in roots], [holder for _, holder in roots]
