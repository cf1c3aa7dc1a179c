"""Values that attributes hold: copied, compared, and changed by much."""

from __future__ import annotations

import array
import enum
import math
import operator
import types
import weakref
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_dp.per_example.checks.named import is_own
from hf_dp.per_example.waiting import answers_at_once

NOTHING = object()
# Whatever comes of a value that a model did not write.
FAILED = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
# What is too large to be copied before and after each step. It is the same as anything.
BIG = object()
_REAL: tuple[Any, ...] = (int, float, Decimal, Fraction)
_WORDS = (complex, str, bytes, type(None), np.generic, enum.Enum, range, slice)
SCALARS = (*_REAL, *_WORDS, torch.dtype, torch.device, torch.layout, torch.memory_format)
SERIES = (tuple, list, deque)
# What Transformers notes of hooks that it has put into a model by itself, for states of layers. They stay there, and
# without it the next pass that is asked for such states would put in others, which note each state once more.
HOOKS_NOTED = "_output_capturing_hooks_installed"
# Attributes of modules that are looked at by other means, or not at all.
OF_MODULES = frozenset({*vars(nn.Module()), HOOKS_NOTED})
_SETS = (set, frozenset)
_PLAIN = frozenset({int, float, bool, str, type(None)})
_ARRAYS = (bytearray, array.array)
COPIED = (*SERIES, *_SETS, *_ARRAYS, Tensor, np.ndarray)
# Of which nothing is looked at but which they are.
UNSEEN_WITHIN = (type, types.BuiltinFunctionType, nn.Module)
_MOST_NUMBERS, _MOST_ITEMS, _DEPTH = 1 << 22, 1 << 14, 4


class Which:
    """An object that is no value, to be told from one that takes its place: by its class, since what it holds is looked
    at by itself; of a function by its code, and of what nobody looks into by which it is.

    Args:
        value: the object. It is held on to if a pass can have put nothing into it: what else there is may be all that a
            pass has computed.
        told: by what it is told, if by something else, and held on to then.
    """

    __slots__ = ("_held", "told")

    def __init__(self, value: Any, told: Any = None) -> None:
        self.told = _told(value) if told is None else told
        is_held = told is not None or isinstance(value, UNSEEN_WITHIN) or _is_bare(value)
        self._held: Callable[[Any], Any] = (lambda _: value) if is_held else _held(value)

    def again(self, present: Any = None) -> Any:
        """The object; where it is gone, one of its class that holds what the `present` one does, or `NOTHING`.

        Raises:
            RuntimeError, TypeError: it is gone, and another is in its place.
        """
        return self._held(present)


def _told(value: Any) -> Any:
    if isinstance(value, types.MethodType):
        return _told(value.__func__), _told(value.__self__)
    if isinstance(value, types.FunctionType):
        return value.__code__ if is_own(value) else value
    return value if isinstance(value, UNSEEN_WITHIN) else type(value)


def _held(value: Any) -> Callable[[Any], Any]:
    if isinstance(value, types.MethodType):
        function, owner = value.__func__, Which(value.__self__)
        return lambda present: types.MethodType(function, owner.again(getattr(present, "__self__", None)))
    kind: Any = type(value)
    found = _weakly(value)

    def again(present: Any) -> Any:
        if (one := found()) is not None:
            return one
        if issubclass(kind, types.FunctionType) and present is None:
            return NOTHING
        one = kind.__new__(kind)  # of functions a TypeError
        if hasattr(one, "__dict__"):
            vars(one).update(getattr(present, "__dict__", {}))
        return one

    return again


def _is_bare(value: Any, depth: int = 0) -> bool:
    """Whether it is a function that names nothing of those around it which a pass may have computed."""
    if not isinstance(value, types.FunctionType) or depth == _DEPTH:  # it may name itself
        return False
    with suppress(ValueError):  # a cell is empty
        found = [cell.cell_contents for cell in value.__closure__ or ()]
        return all(isinstance(one, (*SCALARS, *UNSEEN_WITHIN)) or _is_bare(one, depth + 1) for one in found)
    return False


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # as of dicts
        return lambda: None


def equal(now: Any, before: Tensor) -> bool:
    if not isinstance(now, Tensor) or (now.shape, now.layout) != (before.shape, before.layout):
        return False
    # What a pass has computed of weights stands for itself, and is asked for its numbers when the pass is over.
    now, before = now.detach(), before.detach()
    if before.layout is not torch.strided:
        return all(map(equal, parts(now), parts(before)))
    if now.is_meta or before.is_meta:  # which hold no numbers
        return bool(now.is_meta == before.is_meta)
    if any(one.is_floating_point() and one.element_size() == 1 for one in (now, before)):
        # Of which torch compares no two that lie in one place, nor one with other numbers.
        return bool(now.dtype == before.dtype) and torch.equal(now.view(torch.uint8), before.view(torch.uint8))
    # Most are, and this is the fastest to say so, but for NaN.
    if (now.dtype, now.device) == (before.dtype, before.device) and torch.equal(now, before):
        return True
    return bool((now.eq(before) | (now.ne(now) & before.ne(before))).all())


def parts(sparse: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse one is made of, the values last."""
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return (sparse.to_dense(),)  # of a CPU's own kernels


def same(one: Any, other: Any) -> bool:
    """Whether two values of attributes are the same, of one kind, and no number is another's."""
    if one is other or one is BIG or other is BIG:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and equal(other, one)
    if isinstance(one, SERIES) and isinstance(other, SERIES):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, Which):
        return bool(one.told == other.told)
    if isinstance(one, np.ndarray) and one.dtype == object:
        return one.shape == other.shape and all(map(same, one.flat, other.flat))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return isinstance(one, (*SCALARS, *_SETS, *_ARRAYS)) and bool(one == other or (one != one and other != other))


def copied(value: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(value, tuple):
        return of_kind(value, map(copied, value))
    return value.detach().clone() if isinstance(value, Tensor) else value


def copied_within(value: Any) -> Any:
    """As `copied`, of lists, sets and arrays as well; `BIG` beyond some thousands of items or millions of numbers."""
    if type(value) is list and not value:  # as most of an adapter's are
        return []
    return _copy(value, 0, [_MOST_ITEMS, _MOST_NUMBERS])


def _copy(value: Any, depth: int, room: list[int]) -> Any:
    """As above, of a value at this `depth`, with so much room left for items and numbers."""
    if isinstance(value, Tensor):
        room[1] -= value.numel()
        return BIG if room[1] < 0 else value.detach().clone()
    if isinstance(value, (np.ndarray, *_ARRAYS)):
        room[1] -= value.size if isinstance(value, np.ndarray) else len(value)
        return BIG if room[1] < 0 else value[:] if isinstance(value, _ARRAYS) else value.copy()
    if not isinstance(value, (*SERIES, *_SETS)):
        return value
    room[0] -= len(value)
    if room[0] < 0 or depth == _DEPTH:
        return BIG
    if isinstance(value, _SETS):
        return type(value)(value) if type(value) in _SETS else set(value)
    # Rows are mostly lists of numbers, and there are many.
    is_plain = _PLAIN.issuperset(map(type, value))
    items = list(value) if is_plain else [_copy(item, depth + 1, room) for item in value]
    return BIG if any(item is BIG for item in items) else of_kind(value, items)


def far(value: Any, other: Any) -> Any:
    """Another value of this kind, far from it: no number is its own, and no length that can grow."""
    if isinstance(value, SERIES):
        others = other if isinstance(other, SERIES) and len(other) == len(value) else value
        items = list(map(far, value, others))
        return of_kind(value, items if isinstance(value, tuple) else 2 * items)
    if isinstance(value, _SETS):
        return type(value)(far(item, NOTHING) for item in value)
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        # Where nothing is stored there are zeros, which losses may follow from as well.
        return _laid_out_as(value, far(value.to_dense(), NOTHING))
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return 2 * value.nan_to_num().abs() + 1
        if value.dtype == torch.bool:
            return ~value
        return other if isinstance(other, Tensor) and not same(value, other) else value + 1
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "fc":
            return (2 * np.abs(np.nan_to_num(value)) + 1).astype(value.dtype)
        return ~value if value.dtype.kind == "b" else value + 1 if value.dtype.kind in "iu" else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, np.generic):
        return far(np.asarray(value), NOTHING)[()]
    if isinstance(value, array.array):
        return array.array(value.typecode, (far(one, NOTHING) for one in value)) if value.typecode in "fd" else value
    if isinstance(value, _REAL):
        return 2 * abs(value) + 1 if math.isfinite(value) else 1.0
    return other if other is not NOTHING else value


def _laid_out_as(sparse: Tensor, dense: Tensor) -> Tensor:
    if sparse.layout is torch.sparse_coo:
        return dense.to_sparse(sparse.sparse_dim())
    if sparse.layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=sparse.layout, blocksize=parts(sparse)[-1].shape[1:3])
    return dense.to_sparse(layout=sparse.layout)


def here(
    before: dict[Any, Any], now: dict[Any, Any], besides: Container[Any] = ()
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What there was of what is others now, and what there is, as far as no accelerator need be waited for."""
    if now is before:
        return {}, {}
    if len(now) == len(before) and all(map(operator.is_, chain(now, now.values()), chain(before, before.values()))):
        return {}, {}
    others = [place for place, value in now.items() if before.get(place, NOTHING) is not value]
    others += [place for place in before if place not in now]
    found = {place: (before.get(place, NOTHING), now.get(place, NOTHING)) for place in others if place not in besides}
    moved = {place: two for place, two in found.items() if not any(map(is_away, two)) and not same(*two)}
    return {place: was for place, (was, _) in moved.items()}, {place: one for place, (_, one) in moved.items()}


def is_away(value: Any) -> bool:
    """Whether an accelerator would have to be waited for."""
    if isinstance(value, SERIES):
        return any(map(is_away, value))
    return isinstance(value, Tensor) and not answers_at_once(value.device)


def emptied(value: Any) -> Any:
    """A series or a set without its items; `NOTHING` of what has none to lose."""
    is_series = isinstance(value, (list, deque, set)) and len(value)
    return of_kind(value, ()) if is_series else NOTHING


def refill(held: Any, value: Any) -> bool:
    """Whether `held` could be given what `value` holds, in its place: others may hold it too."""
    if isinstance(held, Tensor) and (held.shape, held.dtype, held.device) == (value.shape, value.dtype, value.device):
        held.data.copy_(value)
        return True
    if type(held) is not type(value):
        return False
    if isinstance(held, (list, array.array)):
        held[:] = value
    elif isinstance(held, (deque, set)):
        items = list(value)
        held.clear()
        held.extend(items) if isinstance(held, deque) else held.update(items)
    elif isinstance(held, np.ndarray) and (held.shape, held.dtype) == (value.shape, value.dtype):
        held[...] = value
    else:
        return False
    return True


def of_kind(value: Any, items: Any) -> Any:
    if isinstance(value, deque):
        return deque(items, value.maxlen)
    make = getattr(value, "_make", type(value) if type(value) in (tuple, list, set) else None)
    return (tuple(items) if isinstance(value, tuple) else list(items)) if make is None else make(items)


def are_hooks(name: Any) -> bool:
    """Whether an attribute of a module of this name, of those that each has, holds hooks."""
    return "hooks" in name and name != HOOKS_NOTED
