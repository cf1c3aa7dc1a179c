"""Privacy losses of many steps from those of single ones, with a bound on what rounding can take away from delta.

A convolution by Fourier transforms is wrong by about 1e-16 of its largest value everywhere, however small the value is
that is looked for; below delta of about 1e-10 that hides the loss. So losses are tilted first: each is weighted with
exp(order x loss), which moves the mass of the sum to where epsilon lies. There rounding is small beside what is summed,
and weighted back it is small beside delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import fft, optimize

# What lies outside of the window of the transform has probability exp(-50) on either side.
_OUTSIDE = 50.0
_LARGEST_WINDOW = 4_000_000
# Where the bounds on delta at many epsilons are to be tightest.
_MIDDLE = 1e-3
_ROUNDING = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class StepLoss:
    """The privacy loss of one step on a grid, under one of the two adjacencies.

    Attributes:
        lowest: the smallest loss, in cells of the grid.
        masses: probabilities (cells,) of the losses from there on.
        infinite: the probability of an infinite loss.
    """

    lowest: int
    masses: np.ndarray
    infinite: float


def as_step_loss(pmf: Any) -> StepLoss:
    """Of `dp_accounting`'s loss on a dense grid."""
    return StepLoss(pmf._lower_loss, np.asarray(pmf._probs), pmf._infinity_mass)


def mixed(parts: Sequence[tuple[float, StepLoss]]) -> StepLoss:
    """The loss where one of several happens, with these probabilities, and it is told which."""
    lowest = min(loss.lowest for _, loss in parts)
    masses = np.zeros(max(loss.lowest + len(loss.masses) for _, loss in parts) - lowest)
    for probability, loss in parts:
        masses[loss.lowest - lowest :][: len(loss.masses)] += probability * loss.masses
    return StepLoss(lowest, masses, math.fsum(probability * loss.infinite for probability, loss in parts))


def composed_epsilon(
    steps: Sequence[tuple[StepLoss, int]], cell: float, delta: float, *, at_least: float = 0.0
) -> float:
    """An upper bound on epsilon at `delta` of independent steps, or `at_least`, whichever is larger.

    Args:
        steps: losses, each with how often it happens.
        cell: the width of the grid in nats, the same for all.
        delta: strictly between 0 and 1.
        at_least: where epsilon is shown to be smaller, how much smaller is not computed.

    Returns:
        epsilon in nats; infinity where no bound is found.

    Source: exponential tilting, the saddle point of Chernoff's bound; errors of the transforms as in Higham 2002,
    "Accuracy and Stability of Numerical Algorithms", theorem 24.2.
    """
    infinite = _infinite(steps)
    # Roundings of the cumulants, each of a few units, are multiplied by the number of steps.
    certain = math.log(delta - infinite) if infinite < delta else -math.inf
    certain -= _cumulant_rounding(steps)
    if certain == -math.inf:
        return math.inf
    sums = _Sums(steps, cell)

    def chernoff(log_order: float) -> float:
        order = math.exp(log_order)
        return (sums.cumulant(order) - certain + _log_share(order)) / order

    # Any order gives a true bound; the best one of Chernoff's is where the tilted sum lies around epsilon.
    best = _best(chernoff)
    if best.fun <= at_least or (tilted := sums.tilted(math.exp(best.x))) is None:
        return max(at_least, float(best.fun))
    return max(at_least, tilted.epsilon(certain, at_most=float(best.fun)))


def composed_deltas(steps: Sequence[tuple[StepLoss, int]], cell: float, epsilons: np.ndarray) -> np.ndarray:
    """Upper bounds on delta at each of `epsilons`, from 0, of independent steps. Args as for `composed_epsilon`.

    They are tight where delta is above about 1e-9. 1 where no bound is found.
    """
    sums = _Sums(steps, cell)

    def chernoff(log_order: float) -> float:
        order = math.exp(log_order)
        return (sums.cumulant(order) - math.log(_MIDDLE) + _log_share(order)) / order

    best = math.exp(_best(chernoff).x)
    found = np.ones_like(epsilons)
    # Losses that have an end have no best order; with a large one what they are at epsilons well below is lost.
    for order in {best, min(1.0, best)}:
        if (tilted := sums.tilted(order)) is not None:
            logs = np.array([tilted.log_delta(float(epsilon)) for epsilon in epsilons])
            bound = np.exp(logs + _cumulant_rounding(steps)) * (1 + 1e-9) + _infinite(steps)
            found = np.fmin(found, bound)
    return found


def _best(bound: Callable[[float], float]) -> Any:
    start = min(np.linspace(-12, 10, 45), key=bound)
    return optimize.minimize_scalar(bound, bounds=(start - 0.5, start + 0.5), method="bounded")


def _infinite(steps: Sequence[tuple[StepLoss, int]]) -> float:
    return -math.expm1(math.fsum(n * math.log1p(-step.infinite) for step, n in steps))


def _cumulant_rounding(steps: Sequence[tuple[StepLoss, int]]) -> float:
    return 8 * _ROUNDING * sum(n for _, n in steps)


class _Sums:
    """The sum of all losses, through its cumulant generating function."""

    def __init__(self, steps: Sequence[tuple[StepLoss, int]], cell: float) -> None:
        self._cell = cell
        self._parts = []
        for step, n in steps:
            kept = np.flatnonzero(step.masses > 0)
            # A negative mass is rounding; without it delta is larger.
            self._parts.append((step.lowest + kept, np.log(step.masses[kept]), n))

    def cumulant(self, order: float) -> float:
        return math.fsum(n * _logsumexp(logs + order * self._cell * cells) for cells, logs, n in self._parts)

    def tilted(self, order: float) -> _Tilted | None:
        """None where the window would be too large."""
        here = self.cumulant(order)
        step = 1e-3 * min(1.0, order)
        deviation = math.sqrt(max(self.cumulant(order + step) + self.cumulant(order - step) - 2 * here, 0.0)) / step
        bounds = []
        for sign in (1, -1):
            moves = [sign * math.sqrt(2 * _OUTSIDE) / max(deviation, self._cell) * 2.0**k for k in range(-6, 7)]
            ends = [(self.cumulant(order + move) - here + _OUTSIDE) / move for move in moves]
            bounds.append(sign * min(sign * end for end in ends))
        first, last = math.floor(bounds[1] / self._cell), math.ceil(bounds[0] / self._cell)
        size = fft.next_fast_len(last - first + 1, real=True)
        if size > _LARGEST_WINDOW:
            return None
        product, error, units = np.ones(size // 2 + 1, dtype=complex), 0.0, 4 * _ROUNDING * math.log2(size + 2)
        total = 0
        for cells, logs, n in self._parts:
            scaled = logs + order * self._cell * cells
            masses = np.exp(scaled - _logsumexp(scaled))
            # A step's loss is nearly always the same. At index 0 that mass is transformed without a rounding.
            likeliest = int(masses.argmax())
            rest = np.bincount((cells - cells[likeliest]) % size, masses, minlength=size)
            rest[0] = 0.0
            product *= (masses[likeliest] + fft.rfft(rest)) ** n
            total += n * int(cells[likeliest])
            error += n * (units * float(np.linalg.norm(rest)) + 2 * _ROUNDING)
        sum_ = fft.irfft(product, size)
        number = sum(n for _, _, n in self._parts)
        error += (units + 8 * number * _ROUNDING) * float(np.linalg.norm(sum_))
        # In the l1 norm, of all cells; and what lies outside of the window, or too far above epsilon to be added up.
        error = math.sqrt(size) * error + 3 * math.exp(-_OUTSIDE)
        losses = self._cell * np.arange(first, first + size)
        return _Tilted(order, here, losses, np.roll(sum_, (total - first) % size).clip(0), error)


@dataclass(frozen=True, eq=False)
class _Tilted:
    order: float
    cumulant: float
    losses: np.ndarray
    masses: np.ndarray
    error: float

    def log_delta(self, epsilon: float) -> float:
        most = _log_share(self.order)
        begin, end = np.searchsorted(self.losses, [epsilon, epsilon + (_OUTSIDE - most) / self.order], side="right")
        above = self.losses[begin:end] - epsilon
        share = float(self.masses[begin:end] @ (np.exp(-self.order * above) * -np.expm1(-above)))
        return self.cumulant - self.order * epsilon + math.log(share + self.error * math.exp(most))

    def epsilon(self, log_delta: float, at_most: float) -> float:
        if at_most <= 0 or self.log_delta(0.0) <= log_delta:
            return 0.0
        if self.log_delta(at_most) > log_delta:
            return at_most
        root = optimize.brentq(lambda x: self.log_delta(x) - log_delta, 0.0, at_most, xtol=1e-14, rtol=1e-10)
        # Of the two sides of the root, the one where delta is kept.
        return min(at_most, float(root) * (1 + 1e-9) + 1e-13)


def _log_share(order: float) -> float:
    """The logarithm of the largest exp(-order u) (1 - exp(-u)): how much of a tilted mass can count in delta."""
    return order * math.log(order) - (1 + order) * math.log1p(order)


def _logsumexp(values: np.ndarray) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))
