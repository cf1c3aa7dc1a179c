"""Normal random numbers of which as many binary digits are drawn as are asked for, and those exactly."""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

# Digits after the point.
DIGITS = 36
# Normals are drawn up to this size; how often one is longer is below 2^-188.
LONGEST = 16
# A word of 64 bits: which entry of the table, the sign, where in its cell, and the first digits of what accepts.
_INDEX, _PLACE, _FIRST = 16, 32, 15
_CELL = 2.0 ** (_PLACE - DIGITS)
# What `_COUNTS` are proportional to, rounded up: as large as 2^16 entries allow.
_SCALE = 3178
# Of a probability, in units of 2^-15: rounding of float64, and how much it changes within one last digit.
_DOUBT = 2.0**-16
_MOST_AT_ONCE = 1 << 14


def _counts() -> NDArray[np.int64]:
    """How many of the entries each cell (256,) has: at least `_SCALE` exp(-x^2 / 2) at its beginning, so anywhere."""
    beginnings = _CELL * np.arange(int(LONGEST / _CELL))
    counts: NDArray[np.int64] = np.ceil(_SCALE * np.exp(-(beginnings**2) / 2)).astype(np.int64)
    counts[0] += 2**_INDEX - counts.sum()
    return counts


_COUNTS = _counts()
_CELLS = np.repeat(np.arange(len(_COUNTS), dtype=np.uint8), _COUNTS)


def _sure() -> NDArray[np.int16]:
    """For each cell (256,) a whole number below 2^15 times the probability of acceptance anywhere in it."""
    ends = _CELL * np.arange(1, len(_COUNTS) + 1)
    least = 2**_FIRST * _SCALE * np.exp(-(ends**2) / 2) / _COUNTS
    sure: NDArray[np.int16] = np.floor(least - _DOUBT).clip(0).astype(np.int16)
    return sure


_SURE = _sure()


def floors(generator: np.random.Generator, size: int) -> NDArray[np.int64]:
    """(size,) int64: floor(2^`DIGITS` X) for independent X ~ N(0, 1), as if X were real numbers (but for `LONGEST`).

    By rejection (von Neumann 1951): a cell is drawn by the table, a place in it uniformly, and accepted with a
    probability that makes the density exp(-x^2 / 2). It is compared with a uniform number digit by digit, and X has as
    many further digits as that takes (as in Karney 2016, doi:10.1145/2710016): nothing is rounded.

    Args:
        generator: of 64-bit words that are uniform and independent.
    """
    made = np.empty(size, np.int64)
    done = 0
    while done < size:
        words = generator.integers(0, 2**64, dtype=np.uint64, size=min(size - done, _MOST_AT_ONCE))
        drawn = _accepted(words, generator)
        made[done : done + len(drawn)] = drawn
        done += len(drawn)
    return made


def _accepted(words: NDArray[np.uint64], generator: np.random.Generator) -> NDArray[np.int64]:
    """What the words (n,) make, (at most n,) int64."""
    signed = words.view(np.int64)
    cells = _CELLS[(signed >> (64 - _INDEX)) & (2**_INDEX - 1)]
    first = signed & (2**_FIRST - 1)
    values = cells.astype(np.int64)
    values <<= _PLACE
    values |= (signed >> _FIRST) & (2**_PLACE - 1)
    accepted = first < _SURE[cells]
    open_ = np.flatnonzero(~accepted)
    wanted = _wanted(values[open_], cells[open_])
    begun = first[open_].astype(np.float64)
    accepted[open_] = begun + 1 <= wanted - _DOUBT
    for i in open_[(begun + 1 > wanted - _DOUBT) & (begun < wanted + _DOUBT)]:
        accepted[i] = is_accepted(int(values[i]), int(first[i]), generator)
    # The floor of a negative number.
    values ^= -((signed >> (63 - _INDEX)) & 1)
    kept: NDArray[np.int64] = values[accepted]
    return kept


def _wanted(values: NDArray[np.int64], cells: NDArray[np.uint8]) -> NDArray[np.float64]:
    """2^15 times the probability of acceptance of sizes (n,) that begin with these digits, to less than `_DOUBT`."""
    densities = np.exp(-((values * 2.0**-DIGITS) ** 2) / 2)
    wanted: NDArray[np.float64] = densities * (2**_FIRST * _SCALE) / _COUNTS[cells]
    return wanted


def is_accepted(value: int, first: int, generator: np.random.Generator) -> bool:
    """Whether a uniform number that begins with `first` is below the probability of acceptance, in whole numbers.

    Args:
        value: the first `DIGITS` digits of a size; more are drawn.
        first: the first digits of the uniform number; more are drawn.
    """
    count, digits = int(_COUNTS[value >> _PLACE]), 0
    while True:
        more = [int(word) for word in generator.integers(0, 2**64, dtype=np.uint64, size=2)]
        value, first, digits = value << 64 | more[0], first << 64 | more[1], digits + 64
        with localcontext(prec=30 + digits // 2) as context:
            rounding = Decimal(10) ** (10 - context.prec)
            # Of sizes from `value` up to the next one, and of numbers that begin with `first`.
            size = Decimal(2) ** (DIGITS + digits)
            most, least = (
                _SCALE * (-((end / size) ** 2) / 2).exp() / count for end in map(Decimal, (value, value + 1))
            )
            below, above = (Decimal(end) / Decimal(2) ** (_FIRST + digits) for end in (first, first + 1))
            if above <= least - rounding:
                return True
            if below >= most + rounding:
                return False
