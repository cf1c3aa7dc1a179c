"""Every random number that a function draws from torch, numpy or Python, in one's own hands.

Draws are told by what they are (torch tags its own), not by a list of names; each has a seed of its own, so that one
can be replaced while all others stay.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.per_example.checks.state import uncompiled
from hf_dp.randomness import global_state, seed_global_state, unchanged_global_state

# A coin that falls with probability p is missed with (1 - p)^1024; of numbers for rows there are many.
_REDRAWS, _REDRAWS_OF_ROWS = 1024, 16
_NUMBERS = 1 << 18
_STATES = {"seed", "set_state", "get_state", "getstate", "setstate", "set_bit_generator", "get_bit_generator"}
# Their numbers depend on one another.
_ARRANGING = {"randperm", "permutation", "shuffle", "sample", "choice", "choices"}


class Draw(NamedTuple):
    """One call for random numbers.

    Attributes:
        name: of the operation.
        shape: of what it gave.
        is_shared: it has no axis of examples.
        place: of whoever drew it.
    """

    name: str
    shape: tuple[int, ...]
    is_shared: bool
    place: str


class Change(NamedTuple):
    """What becomes of the draws: all stay as they are, unless told otherwise.

    Attributes:
        row: where numbers belong to examples, those of all others change; None for numbers that belong to all.
        extreme: what numbers become: "least" or "most" of many draws, or "another" draw; "" changes none.
        only: the index of the draw to change, of those that belong to all; None for all of these.
        is_interleaved: examples alternate along an axis that is longer than their number, rather than in blocks.
        is_alike: all examples get the numbers of the first, and all draws of one kind the same.
        start: of the global generators, for functions that are not seen.
    """

    row: int | None = None
    extreme: str = ""
    only: int | None = None
    is_interleaved: bool = False
    is_alike: bool = False
    start: int = 0


class Draws(TorchDispatchMode):
    """While attached, random numbers for `size` examples are as `change` says; under no change, always the same.

    Attributes:
        seen: all draws, in order.
        has_own_generator: a draw came from a generator other than the global ones, or numpy made one without a seed.
        has_unseen: a global generator gave numbers in another way, as by `from random import random`.
        states: of the global generators, before each draw; no draw that is seen moves them.
        of_first: if all are alike, the numbers of the first example in each draw, none where they belong to all.
    """

    def __init__(
        self, size: int, change: Change, place: Callable[[], str] = str, *, given: Sequence[list[Any]] = ()
    ) -> None:
        """`given`: `of_first` of a run with another number of examples, for the examples of this one."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.change, self.place, self.given = size, change, place, given
        self.seen: list[Draw] = []
        self.of_first: list[list[Any]] = []
        self.has_own_generator = self.has_unseen = False
        self.states: list[tuple[int, ...]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while it is attached, and torch would say so again for each operation.
        return False

    @property
    def is_silent(self) -> bool:
        """Whether nothing was drawn, as far as is seen."""
        return not (self.seen or self.has_unseen or self.has_own_generator)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Also numpy's and Python's global functions are seen, where they are looked up in their modules."""
        with uncompiled(), unchanged_global_state():
            seed_global_state(self.change.start)
            before, functions, made = global_state(), list(_functions()), np.random.default_rng
            try:
                for module, name, function in functions:
                    setattr(module, name, functools.partial(self._called, name, function))
                np.random.default_rng = self._made(made)
                with self:
                    yield
            finally:
                np.random.default_rng = made
                for module, name, function in functions:
                    setattr(module, name, function)
            self.has_unseen = global_state() != before

    def _made(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            self.has_own_generator |= not any(value is not None for value in (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return made

    def _called(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._drawn(name, functools.partial(function, *args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func):
            return func(*args, **(kwargs or {}))
        draw = functools.partial(func, *args, **(kwargs or {}))
        self.has_own_generator |= any(isinstance(value, torch.Generator) for value in (*args, *(kwargs or {}).values()))
        name = func.overloadpacket.__name__
        # In place, as bernoulli_, or into `out`.
        target = args[0] if func._schema.name.endswith("_") else (kwargs or {}).get("out")
        if not isinstance(target, Tensor):
            return self._drawn(name, draw, func.namespace == "aten")
        return target.copy_(self._drawn(name, lambda: draw().clone(), func.namespace == "aten"))

    def _drawn(self, name: str, draw: Callable[[], Any], is_torchs: bool = False) -> Any:
        index, change = len(self.seen), self.change
        states, seed = tuple(map(hash, global_state())), 0 if change.is_alike else index
        with unchanged_global_state():
            seed_global_state(seed)
            usual = draw()
            leaves = _leaves(usual)
            if _drew_nothing(leaves, seed, draw, is_torchs):
                return usual
            self.states.append(states)
            axes = [axis for axis in map(self._axis, leaves) if axis is not None]
            is_shared = not axes or name in _ARRANGING
            shape = max((tuple(np.shape(leaf)) for leaf in leaves), key=len, default=())
            numbers = sum(int(np.prod(np.shape(leaf))) for leaf in leaves)
            self.seen.append(Draw(name, shape, is_shared, self.place()))
            if change.is_alike:
                self.of_first.append([])
                return usual if is_shared else self._alike(usual)
            seed_global_state(index, 1)
            if is_shared and change.row is None and change.extreme and change.only in (None, index):
                return self._extreme(draw, numbers)
            if not is_shared and change.extreme and change.row is not None:
                return _combined(usual, self._extreme(draw, numbers), self._keep_row)
        return usual

    def _extreme(self, draw: Callable[[], Any], numbers: int) -> Any:
        found = draw()
        if self.change.extreme not in ("least", "most") or found is None:
            return found
        least, most = (np.minimum, torch.minimum), (np.maximum, torch.maximum)
        pick = least if self.change.extreme == "least" else most
        most_often = _REDRAWS if self.change.row is None else _REDRAWS_OF_ROWS
        for _ in range(max(1, min(most_often, _NUMBERS // max(1, numbers)))):
            found = _combined(found, draw(), lambda one, two: pick[isinstance(one, Tensor)](one, two))
        return found

    def _axis(self, leaf: Any) -> int | None:
        """The axis as long as there are examples, or else the first that could be of examples with others."""
        shape = np.shape(leaf)
        whole = [axis for axis, n in enumerate(shape) if n == self.size]
        parts = [axis for axis, n in enumerate(shape) if n and n % self.size == 0]
        return next(iter(whole + parts), None)

    def _keep_row(self, usual: Any, other: Any) -> Any:
        axis = self._axis(usual)
        if axis is None or usual.shape != other.shape:
            return usual
        n = usual.shape[axis]
        owner = np.arange(n) % self.size if self.change.is_interleaved else np.arange(n) // (n // self.size)
        is_kept = (owner == self.change.row).reshape(-1, *[1] * (len(usual.shape) - axis - 1))
        if isinstance(usual, Tensor):
            return torch.where(torch.from_numpy(is_kept).to(usual.device), usual, other)
        return np.where(is_kept, usual, other)

    def _alike(self, value: Any) -> Any:
        """The numbers of the first example, or those that are given, for all."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._alike, value))
        axis = self._axis(value)
        if axis is None:
            return value
        places = np.arange(value.shape[axis])
        of_one = len(places) // self.size
        first = _taken(value, places[:: self.size] if self.change.is_interleaved else places[:of_one], axis)
        drawn, of_draw = len(self.of_first) - 1, self.of_first[-1]
        given = next(iter([*self.given[drawn : drawn + 1], []][0][len(of_draw) :]), first)
        of_draw.append(first)
        first = _begun_as(given, first)
        return _taken(first, places // self.size if self.change.is_interleaved else places % of_one, axis)


def _functions() -> Iterator[tuple[Any, str, Any]]:
    """Those that draw from numpy's and Python's global generators, each with its module and its name there."""
    for module, owner in ((np.random, np.random.mtrand._rand), (random, random._inst)):
        for name, function in vars(module).items():
            if getattr(function, "__self__", None) is owner and name not in _STATES:
                yield module, name, function


@functools.cache
def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _taken(value: Any, places: Any, axis: int) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(axis, torch.from_numpy(places).to(value.device))
    return np.take(value, places, axis)


def _begun_as(given: Any, value: Any) -> Any:
    """`value` with the numbers of `given` where both have some: a row with more padding has more of them."""
    if given is value or len(given.shape) != len(value.shape):
        return value
    both = tuple(slice(min(pair)) for pair in zip(given.shape, value.shape, strict=True))
    begun = value.clone() if isinstance(value, Tensor) else value.copy()
    begun[both] = given[both]
    return begun


def _drew_nothing(leaves: list[Any], seed: int, draw: Callable[[], Any], is_torchs: bool) -> bool:
    """Attention with dropout 0, say: no generator moved since `seed` was set, and another seed gives the same.

    Of torch's own operations the first result alone is compared: attention on a GPU gives states of generators beside
    it, which without dropout are whatever was in that memory.
    """
    if any(isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "cuda") for leaf in leaves):
        return False  # Their generators are not looked at.
    moved = global_state()
    seed_global_state(seed)
    if global_state() != moved:
        return False
    seed_global_state(seed, 1)
    again = _leaves(draw())
    compared = 1 if is_torchs else None
    return len(leaves) == len(again) > 0 and all(map(_is_same, leaves[:compared], again))


def _is_same(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, Tensor) else bool(np.array_equal(one, two))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value] if isinstance(value, (Tensor, np.ndarray, np.generic, int, float)) else []


def _is_state(value: Any) -> bool:
    """Beside a result, that of a generator on a GPU: no number, and the greater of two is not computed there."""
    return isinstance(value, Tensor) and value.dtype == torch.uint64


def _combined(one: Any, two: Any, pick: Callable[[Any, Any], Any]) -> Any:
    """`pick` of each pair of numbers or tensors; where there is no pair, what `one` has."""
    if isinstance(one, (tuple, list)) and len(one) == len(two):
        both = enumerate(zip(one, two, strict=True))
        return type(one)(x if place and _is_state(x) else _combined(x, y, pick) for place, (x, y) in both)
    is_pair = bool(_leaves(one)) and np.shape(one) == np.shape(two)
    if isinstance(one, (int, float)) and is_pair:
        return type(one)(pick(one, two))
    return pick(one, two) if is_pair else one
