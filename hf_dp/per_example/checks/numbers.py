"""The same random numbers for all examples, however many they are: what differs then is not by chance.

Models that draw numbers in eval mode too (variational, diffusion and masked autoencoders) are compared so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from hf_dp.errors import PreflightError
from hf_dp.per_example.checks.draws import Change, Draws

# A context for so many examples, in which they are computed.
Numbers = Callable[[int], AbstractContextManager[Any]]
_Found = TypeVar("_Found")


class NumbersAlike:
    """Within a call of it, all examples get the same random numbers, which are those of the first call.

    Attributes:
        first: `Draws.of_first` of that call.
    """

    def __init__(self, *, is_interleaved: bool) -> None:
        self.change = Change(is_alike=True, is_interleaved=is_interleaved)
        self.first: list[list[Any]] = []

    @contextmanager
    def __call__(self, size: int) -> Iterator[None]:
        """For `size` examples."""
        draws = Draws(size, self.change, given=self.first)
        with draws.attached():
            yield
        self.first = self.first or draws.of_first


def under_numbers_alike(check: Callable[[Numbers], _Found]) -> _Found:
    """What `check` finds with the numbers of examples in blocks; if it refuses, with those that alternate.

    Raises:
        PreflightError: of `check`, for both.
    """
    blocks = NumbersAlike(is_interleaved=False)
    try:
        return check(blocks)
    except PreflightError:
        if not any(blocks.first):
            raise
    return check(NumbersAlike(is_interleaved=True))
