"""Factors of uses that one example alone came to, as in a loop in Python over whole examples.

A use of example i has factors of a batch of one. Those of all examples are put together when the backward pass is over:
the first use of each is one use of all, and so on. Kept each by itself, with zeros for all others, they would take as
many times the memory as there are examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_dp.per_example.factors import DistinctRows, Factors, Outer, PerExample
from hf_dp.per_example.gram import Side
from hf_dp.per_example.ieee import full_precision
from hf_dp.per_example.lengths import Lengths
from hf_dp.per_example.norms import magnitude_of
from hf_dp.per_example.rule import refuse_changed

Keep = Callable[[str, Factors], None]
# Of which example the factors are that are handed on, and of how many. A backward pass has a thread for each device.
_ONE: ContextVar[tuple[int, int] | None] = ContextVar("_ONE", default=None)


class of_example:  # noqa: N801 - it is called as a function
    """Inside, factors that are handed on are those of one of so many examples; of all of them where it is None."""

    # No generator: it is entered for each use of each parameter.
    __slots__ = ("_example", "_token")

    def __init__(self, example: tuple[int, int] | None) -> None:
        self._example = example

    def __enter__(self) -> None:
        self._token = _ONE.set(self._example)

    def __exit__(self, *given: object) -> None:
        _ONE.reset(self._token)


class Apart:
    """Factors of single examples, by the name of what they are of, until they are put together."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[int, Factors]]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._size = 0

    def keeps(self, name: str, factors: Factors) -> bool:
        """Whether they are of one example alone; they are kept then."""
        if (one := _ONE.get()) is None:
            return False
        example, self._size = one
        self._known.setdefault(name, []).append((example, factors))
        sides = (factors.left, factors.right) if isinstance(factors, Outer) else ()
        tensors = [side.tensor for side in sides] or [factors.values]  # type: ignore[union-attr]
        self._versions += [(one, one._version) for one in tensors if not one.is_inference()]
        return True

    def before(self, keep: Keep) -> Keep:
        """What keeps here what is of one example, and hands on the rest."""

        def taken(name: str, factors: Factors) -> None:
            if not self.keeps(name, factors):
                keep(name, factors)

        return taken

    @torch.no_grad()
    def hand_on(self, keep: Keep) -> None:
        """Hands on what was kept."""
        refuse_changed(self._versions)
        self._versions.clear()
        while self._known:
            name = next(iter(self._known))
            several = self._known.pop(name)
            with full_precision(_device_of(several[0][1])):
                for together in _in_turn(several):
                    keep(name, _together(together, self._size))


def _in_turn(several: Sequence[tuple[int, Factors]]) -> list[dict[int, Factors]]:
    """The first of each example, the second, and so on, of those that can be put together."""
    turns: list[dict[int, Factors]] = []
    for example, factors in several:
        found = (turn for turn in turns if example not in turn and _are_alike(next(iter(turn.values())), factors))
        turn = next(found, None)
        if turn is None:
            turns.append({example: factors})
        else:
            turn[example] = factors
    return turns


def _are_alike(first: Factors, second: Factors) -> bool:
    if isinstance(first, Outer) and isinstance(second, Outer):
        if type(first) is not type(second):
            return False
        sides = zip((first.left, first.right), (second.left, second.right), strict=True)
        are_same = all(
            type(one) is type(other) and one.size == other.size and one.tensor.dtype == other.tensor.dtype
            for one, other in sides
        )
        return are_same and first.scale == second.scale and first.given is None and second.given is None
    return (
        isinstance(first, PerExample)
        and isinstance(second, PerExample)
        and first.values.shape == second.values.shape
        and first.values.dtype == second.values.dtype
    )


def _together(known: Mapping[int, Factors], size: int) -> Factors:
    """Those of `size` examples, of which the others have none."""
    first = next(iter(known.values()))
    if isinstance(first, Outer) and first.given is None and type(first) in (Outer, DistinctRows):
        outers = {example: one for example, one in known.items() if isinstance(one, Outer)}
        left = _side({example: one.left for example, one in outers.items()}, size)
        right = _side({example: one.right for example, one in outers.items()}, size)
        return Outer(left, right, first.scale)
    values = _rows({e: _instantiated(one).values for e, one in known.items()}, size)
    magnitudes = _rows({e: magnitude_of(one)[:, None] for e, one in known.items()}, size)
    return PerExample(values, lengths=Lengths(magnitudes))


def _instantiated(factors: Factors) -> PerExample:
    return factors.instantiated() if isinstance(factors, Outer) else factors


def _side(sides: Mapping[int, Side], size: int) -> Side:
    """Positions that an example lacks are zero, as ids and as numbers: beside ids a zero is what adds nothing."""
    most = max(one.tensor.shape[1] for one in sides.values())
    padded = {
        e: F.pad(one.tensor, [0, 0] * (one.tensor.dim() - 2) + [0, most - one.tensor.shape[1]])
        for e, one in sides.items()
    }
    return next(iter(sides.values())).of(_rows(padded, size))


def _rows(known: Mapping[int, Tensor], size: int) -> Tensor:
    """(size, ...) from (1, ...) of some examples."""
    first = next(iter(known.values()))
    out = first.new_zeros(size, *first.shape[1:])
    for example, one in known.items():
        out[example] = one[0]
    return out


def _device_of(factors: Factors) -> torch.device:
    return factors.device if isinstance(factors, Outer) else factors.values.device
