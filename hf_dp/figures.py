"""Bounds as they are printed: rounded up, since a smaller one would not be true."""

from __future__ import annotations

import decimal
import math

# What a float cannot hold, and what sums of floats round, is no reason to say more.
_EXACT = decimal.Context(prec=12)


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


def logged(epsilon: float) -> float:
    """To four decimals, as logs have it, never below it."""
    return math.ceil(epsilon * 10**4 - 1e-8) / 10**4 if math.isfinite(epsilon) else epsilon


def percent(share: float) -> str:
    """A share as it was given."""
    return f"{100 * share:.12g}%"


def at_most(share: float, digits: int = 1) -> str:
    """A bound as a percentage with so many decimals, never below it."""
    scale = 10 ** (digits + 2)
    return f"{math.ceil(share * scale - 1e-9) / scale:.{digits}%}"
