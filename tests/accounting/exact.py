"""Delta to rounding, by a third way: an integral over complex orders, through the saddle point.

Let L be the sum of the privacy losses log(P / Q) of all uses, and K(z) the sum of log E_P[exp(z log(P / Q))]. For every
c > 0, delta(epsilon) = E[(1 - exp(epsilon - L))+] is the integral of exp(K(z) - z epsilon) / (z (z + 1)) over the line
Re z = c, by 2 pi i: that of exp(z l) / (z (z + 1)) is (1 - exp(-l))+. Expectations are sums over an even grid of x,
which for normals is exact to rounding. No loss is rounded to a grid, and P and Q may be any mixtures of normals.

No part of the package is used here, nor of dp_accounting.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, special

# Losses below are expanded, since a difference from 1 would round them away.
_SMALL = 1e-4
_FAR, _FARTHEST = 40.0, 4000.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_MOST_PIECES, _END = 150, 1e-11
_NO_HEIGHT = 1e300


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Of two normals whose means are mu deviations apart (Balle and Wang 2018, arXiv:1805.06530, theorem 8)."""
    with_it, without = (special.ndtr(sign * mu / 2 - epsilon / mu) for sign in (1, -1))
    return float(with_it - math.exp(epsilon) * without)


@dataclass(frozen=True)
class Pair:
    """What is released with a unit, and without it.

    Attributes:
        noise: standard deviation of every part.
        with_it, without: means and their probabilities.
        times: how often it is used.
    """

    noise: float
    with_it: tuple[tuple[float, float], ...]
    without: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    times: int = 1

    @functools.cached_property
    def _span(self) -> float:
        return max(abs(mean) for mean, _ in (*self.with_it, *self.without)) / self.noise

    @functools.lru_cache(maxsize=4)  # noqa: B019 - of a frozen value, in a test
    def _on_grid(self, order: int) -> tuple[np.ndarray, np.ndarray]:
        """Losses, and the logs of Q's weights, as far as orders up to this one see."""
        reach = self._span * (order + 1)
        if reach > _FARTHEST:
            raise OverflowError(reach)
        u, width = np.linspace(-_FAR - reach, _FAR + reach, math.ceil((_FAR + reach) * 2 / self._width), retstep=True)

        def log_density(parts: Sequence[tuple[float, float]]) -> np.ndarray:
            logs = np.stack([math.log(p) + u * m / self.noise - (m / self.noise) ** 2 / 2 for m, p in parts])
            top = logs.max(0)
            return top + np.log(np.exp(logs - top).sum(0))

        under = log_density(self.without)
        losses = log_density(self.with_it) - under
        if self.without == ((0.0, 1.0),):
            with np.errstate(over="ignore"):
                excess = sum(p * np.expm1(u * m / self.noise - (m / self.noise) ** 2 / 2) for m, p in self.with_it)
            losses = np.where(np.abs(excess) < 0.5, np.log1p(np.clip(excess, -0.9, 1.0)), losses)
        return losses, under - u * u / 2 + math.log(width / math.sqrt(2 * math.pi))

    @property
    def _width(self) -> float:
        return min(0.04, 0.15 * self.noise)

    def cumulant(self, z: complex, reversed_: bool) -> complex:
        """Of all uses; of log(Q / P) under Q where it is reversed."""
        order = 2 ** math.ceil(math.log2(abs(z.real) + 2))
        losses, logs = self._on_grid(order)
        a = -z if reversed_ else z + 1
        top = float((logs + a.real * losses).max())
        if abs(a) * _SMALL > 0.01 or top > 600:
            return self.times * (top + np.log(np.exp(logs + a * losses - top).sum()))
        # E_Q[exp(a L)] - 1 = E_Q[exp(a L) - 1 - a (exp(L) - 1)], as E_Q[exp(L)] = 1.
        small = np.abs(losses) < _SMALL
        few, rest, weights = losses[small], losses[~small], logs[~small]
        moved = np.exp(logs[small]) @ (_two_terms_less(a * few) - a * _two_terms_less(few))
        moved += (np.exp(weights + a * rest) - np.exp(weights) - a * (np.exp(weights + rest) - np.exp(weights))).sum()
        return self.times * (np.log1p(moved) if abs(moved) < 0.1 else np.log(1 + moved))


def log_delta(pairs: Sequence[Pair], epsilon: float) -> float:
    """The larger one of both directions (`ArithmeticError` where no more than a bound on it is known)."""
    larger, is_known = log_delta_or_bound(pairs, epsilon)
    if not is_known:
        raise ArithmeticError(f"no more than {larger}; its orders are too large")
    return larger


def log_delta_or_bound(pairs: Sequence[Pair], epsilon: float) -> tuple[float, bool]:
    """The larger one of both directions, and whether it is this, or at most this (`ArithmeticError` where an integral
    does not end)."""
    return max(_log_delta_or_bound(pairs, epsilon, reversed_) for reversed_ in (False, True))


def _log_delta_or_bound(pairs: Sequence[Pair], epsilon: float, reversed_: bool) -> tuple[float, bool]:
    def log_height(z: complex) -> complex:
        cumulant = sum(pair.cumulant(z, reversed_) for pair in pairs)
        return cumulant - z * epsilon - np.log(z) - np.log1p(z)

    def on_axis(log_order: float) -> float:
        try:
            found = float(log_height(complex(math.exp(log_order))).real)
        except OverflowError:
            return _NO_HEIGHT
        return found if math.isfinite(found) else _NO_HEIGHT

    start = min(np.linspace(-9, 12, 43), key=on_axis)
    found = optimize.minimize_scalar(on_axis, bounds=(start - 0.5, start + 0.5), method="bounded")
    order, least = math.exp(found.x), float(found.fun)
    step = 1e-3 * order
    near = [on_axis(math.log(order + move)) for move in (-step, 0.0, step)]
    if near[2] == _NO_HEIGHT:  # Orders beyond it cannot be computed; Chernoff's bound holds at each.
        return least + math.log1p(order), False
    width = 1.5 * step / math.sqrt(max(near[0] - 2 * near[1] + near[2], 1e-30))
    whole = _integral(lambda t: np.exp(log_height(order + 1j * t) - least).real, width)
    return least + math.log(whole / math.pi), True


def _integral(value: Callable[[float], Any], width: float) -> float:
    """From 0 on, until nothing is added."""
    total, begin, quiet = 0.0, 0.0, 0
    for piece in range(_MOST_PIECES):
        values = np.array([float(value(begin + (node + 1) / 2 * width)) for node in _NODES])
        total += float(values @ _WEIGHTS) * width / 2
        begin += width
        quiet = quiet + 1 if np.abs(values).max() * begin < _END * max(total, 1e-300) else 0
        if quiet == 2:
            return total
        width *= 1.15 if piece > 8 else 1.0
    raise ArithmeticError(f"{_MOST_PIECES} pieces are not all of it")


def _two_terms_less(x: Any) -> Any:
    """exp(x) - 1 - x of small x; that of 0.01 is exact to rounding."""
    return x * x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7)))))
