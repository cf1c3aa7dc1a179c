"""Bounds as they are printed: rounded up, since a smaller one would not be true."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable

# What a float cannot hold, and what sums of floats round, is no reason to say more.
_EXACT = decimal.Context(prec=12)
# That anybody reads in full.
_LONGEST = 1e15


def upper(bound: float, digits: int) -> str:
    """A bound to so many significant digits, never below it."""
    if not math.isfinite(bound):
        return f"{bound:g}"
    up = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(up.plus(_EXACT.create_decimal_from_float(bound))):.{digits}g}"


def lower(amount: float, digits: int) -> str:
    """What protects, such as noise, to so many significant digits, never above it."""
    if not math.isfinite(amount):
        return f"{amount:g}"
    down = decimal.Context(prec=digits, rounding=decimal.ROUND_FLOOR)
    return f"{float(down.plus(_EXACT.create_decimal_from_float(amount))):.{digits}g}"


def times(factor: float) -> str:
    """A factor for readers who know no powers of ten, never below it: 2,981 for exp(8)."""
    return upper(factor, 3) if factor < 100 else _in_full(factor, upper(factor, 4), math.ceil)


def one_in(probability: float) -> str:
    """A probability as one case in so many, never below it."""
    if not probability:
        return "never"
    if not math.isfinite(cases := 1 / probability):
        return f"1 in {_power_of_ten(-math.log10(probability), math.floor)}"
    return f"1 in {_in_full(cases, lower(cases, 4), math.floor)}"


def _in_full(number: float, digits: str, safely: Callable[[float], int]) -> str:
    if not math.isfinite(number):
        return digits
    return f"{safely(float(digits)):,}" if number < _LONGEST else _power_of_ten(math.log10(number), safely)


def _power_of_ten(exponent: float, safely: Callable[[float], int]) -> str:
    return f"a 1 with {safely(exponent)} zeros"


def logged(epsilon: float, noise_multiplier: float) -> dict[str, float]:
    """Both to the four significant digits that Trainer's console has: epsilon never below it, the noise never above."""
    return {"epsilon": float(upper(epsilon, 4)), "noise_multiplier": float(lower(noise_multiplier, 4))}


def steps_in_words(steps: int) -> str:
    """So many steps, or one."""
    return f"{steps} step{'' if steps == 1 else 's'}"


def row_in_words(index: int) -> str:
    """Which row, of a file or of a dataset, so that `rows[index]` is the one."""
    return f"row {index} (counted from 0)"


def percent(share: float) -> str:
    """A share as it was given."""
    return f"{100 * share:.12g}%"


def at_most(share: float, digits: int = 1) -> str:
    """A bound as a percentage with so many decimals, never below it."""
    scale = 10 ** (digits + 2)
    return f"{math.ceil(share * scale - 1e-9) / scale:.{digits}%}"
