"""Lower bounds on delta, by another way than the library's: what nobody can claim less than.

A mechanism's outcome x is a mixture of normals, P with a unit and Q without it. The line is cut into intervals whose
probabilities have a ratio on a grid, P(interval) = exp(c + j h) Q(interval), found one after the other. To tell the
interval instead of x is post-processing, so the pair of these is no easier to tell apart than the mechanism is, however
often it is used; and where P is a little more than that, or beyond the ends, it is left out, which makes delta smaller
still. Sums of such losses lie on a grid, and their distribution is a power of a Fourier transform, exponentially tilted
to where epsilon lies, with what the window and rounding may have added taken off.

No part of the package is used here, nor of dp_accounting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

# Of the tilted sum, what lies outside of the window; natural logarithm.
_OUTSIDE = 36.0
_LARGEST_WINDOW = 1 << 23
# Of one loss; sums take some times as many.
_CELLS = 1 << 18
# Relative, to which ratios are exact.
_RATIO = 1e-12
# Of intervals, with the loss that they begin at: what is told apart there is small beside it.
_GROWTH = 0.002
# Standard deviations at which the line ends.
_END = 14.0


@dataclass(frozen=True)
class Mixture:
    """Normals of one standard deviation.

    Attributes:
        noise: that one.
        parts: means and their probabilities.
    """

    noise: float
    parts: tuple[tuple[float, float], ...]

    def log_density(self, x: float) -> float:
        """But for a term that all such mixtures share."""
        logs = [math.log(p) + (x * m - m * m / 2) / self.noise**2 for m, p in self.parts]
        return (top := max(logs)) + math.log(math.fsum(math.exp(each - top) for each in logs))

    def between(self, a: float, b: float) -> float:
        """The probability of an interval, without cancellation in either tail."""
        scale, found = self.noise * math.sqrt(2), 0.0
        for m, p in self.parts:
            low, high = (a - m) / scale, (b - m) / scale
            if low < 0:
                low, high = -high, -low
            found += p * ((math.erfc(low) - math.erfc(high)) if low >= 0 else math.erf(high) - math.erf(low)) / 2
        return found


def sampled(q: float, noise: float, rows: int = 1) -> Mixture:
    """A sum of ones over a Poisson sample of so many rows."""
    chances = [math.comb(rows, j) * q**j * (1 - q) ** (rows - j) for j in range(rows + 1)]
    return Mixture(noise, tuple((float(j), p) for j, p in enumerate(chances) if p > 0))


def alone(noise: float) -> Mixture:
    """Noise."""
    return Mixture(noise, ((0.0, 1.0),))


@dataclass(frozen=True, eq=False)
class Step:
    """The privacy loss of one use, on a grid.

    Attributes:
        losses: (cells,) whole numbers of grid cells, each with
        masses: (cells,) its probability; together a little less than 1.
        times: how often it is used.
        offset: what is added to each loss, in nats.
    """

    losses: np.ndarray
    masses: np.ndarray
    times: int
    offset: float


def grid_of(pairs: Sequence[tuple[Mixture, Mixture, int]]) -> float:
    """A width that is fine beside the deviation of one loss, if that is not too many cells of the widest."""
    deviation = min(_deviation(p, q) for p, q, _ in pairs)
    widest = max(_largest_loss(p, q) for p, q, _ in pairs)
    return min(max(deviation / 10, widest / _CELLS), 0.02)


def step_of(p: Mixture, q: Mixture, times: int, h: float) -> Step:
    """The intervals of one use, on a grid of width h, whose place is that of the first interval."""
    means = [m for m, _ in (*p.parts, *q.parts)]
    first, last = min(means) - _END * p.noise, max(means) + _END * p.noise
    # Losses rise or fall with x; they are met as they rise.
    rises = p.log_density(last) - q.log_density(last) > p.log_density(first) - q.log_density(first)
    sign, a, end = (1.0, first, last) if rises else (-1.0, -last, -first)

    def loss(x: float) -> float:
        return p.log_density(sign * x) - q.log_density(sign * x)

    def both(a: float, b: float) -> tuple[float, float]:
        ends = sorted((sign * a, sign * b))
        return p.between(ends[0], ends[1]), q.between(ends[0], ends[1])

    lowest = loss(a)
    # Where all losses that are likely lie within a cell, they are one interval.
    b = _where(loss, 4 * h if abs(lowest) < 2 * h else lowest + h, a, end)
    one, other = both(a, b)
    offset = math.log(one / other)
    losses, masses = [0], [one]
    while b < end:
        a, here = b, (loss(b) - offset) / h
        wanted = math.ceil(here + 0.5 + _GROWTH * abs(loss(b)) / h)
        one, other = both(a, end)
        while wanted > here and one <= math.exp(offset + wanted * h) * other:
            wanted -= 1
        if wanted <= here:
            b, wanted = end, math.floor((math.log(one / other) - offset) / h) if min(one, other) > 0 else 0
        else:
            b = _mean_at(both, a, _where(loss, offset + wanted * h, a, end), end, offset + wanted * h)
        one, other = both(a, b)
        mass = min(one, math.exp(offset + wanted * h) * other)
        if mass > 0:
            losses.append(wanted)
            masses.append(mass)
    return Step(np.array(losses), np.array(masses), times, offset)


def reversed_(step: Step, h: float) -> Step:
    """The same intervals the other way round, P for Q: all but the last, whose ratio was rounded down."""
    masses = step.masses * np.exp(-step.offset - h * step.losses) * (1 - _RATIO)
    return Step(-step.losses[:-1], masses[:-1], step.times, -step.offset)


def _mean_at(
    both: Callable[[float, float], tuple[float, float]], a: float, at_least: float, end: float, value: float
) -> float:
    """Where an interval from a ends whose ratio is at least exp(value), and hardly more."""

    def excess(b: float) -> float:
        one, other = both(a, b)
        return one - math.exp(value) * other

    high, width = at_least, max(at_least - a, 1e-9)
    while excess(high) <= 0:
        high, width = min(end, high + width), 2 * width
    found = optimize.brentq(excess, at_least, high, xtol=1e-14, rtol=1e-14) if excess(at_least) < 0 else at_least
    while excess(found) < 0:
        found += 1e-13 * max(1.0, abs(found))
    return min(float(found), end)


def delta(steps: Sequence[Step], h: float, epsilon: float) -> float:
    """A lower bound on delta at `epsilon` of all these together."""
    # Of losses without their offsets.
    epsilon -= math.fsum(s.times * s.offset for s in steps)

    def cumulant(order: float) -> float:
        return math.fsum(s.times * _log_sum(np.log(s.masses) + order * h * s.losses) for s in steps)

    found = optimize.minimize_scalar(
        lambda log: cumulant(math.exp(log)) - math.exp(log) * epsilon, bounds=(-9, 9), method="bounded"
    )
    order = math.exp(found.x)
    here, ends = cumulant(order), []
    for sign in (1, -1):
        moves = [sign * 2.0**k for k in range(-18, 10)]
        ends.append(min(sign * (cumulant(order + move) - here + _OUTSIDE) / move for move in moves) * sign)
    low, high = math.floor(ends[1] / h), math.ceil(ends[0] / h)
    size = 1 << max(4, (high - low).bit_length())
    if size > _LARGEST_WINDOW:
        raise MemoryError(f"a window of {size} cells")
    transform, number = np.ones(size // 2 + 1, dtype=complex), 0
    for s in steps:
        logs = np.log(s.masses) + order * h * s.losses
        masses = np.bincount(s.losses % size, np.exp(logs - _log_sum(logs)), minlength=size)
        transform *= np.fft.rfft(masses) ** s.times
        number += s.times
    sums = np.roll(np.fft.irfft(transform, size), -low % size)
    above = h * (low + np.arange(size)) - epsilon
    counted = (above > 0) & (np.arange(size) <= high - low)
    share = float(sums[counted] @ (np.exp(-order * above[counted]) * -np.expm1(-above[counted])))
    added = 4 * math.exp(-_OUTSIDE) + 1e-16 * (number + 50) * math.sqrt(size)
    return math.exp(here - order * epsilon) * max(share - added, 0.0)


def epsilon(steps: Sequence[Step], h: float, at: float, below: float) -> float:
    """A lower bound on epsilon at delta `at`, up to `below`, to 5e-5 of that; 0 if there is none."""
    if delta(steps, h, below) > at:
        return below
    if delta(steps, h, 0.0) <= at:
        return 0.0
    found = optimize.brentq(
        lambda e: math.log(max(delta(steps, h, e), 1e-300) / at), 0.0, below, xtol=5e-5 * below, rtol=5e-5
    )
    return max(float(found) - 5e-5 * below, 0.0)


def _largest_loss(p: Mixture, q: Mixture) -> float:
    means = [m for m, _ in (*p.parts, *q.parts)]
    ends = min(means) - _END * p.noise, max(means) + _END * p.noise
    return max(abs(p.log_density(x) - q.log_density(x)) for x in ends)


def _deviation(p: Mixture, q: Mixture) -> float:
    z = np.linspace(-9, 9, 1201)
    weights = np.exp(-(z**2) / 2) * (z[1] - z[0]) / math.sqrt(2 * math.pi)
    first = second = 0.0
    for m, chance in p.parts:
        losses = np.array([p.log_density(m + p.noise * x) - q.log_density(m + p.noise * x) for x in z])
        first += chance * float(weights @ losses)
        second += chance * float(weights @ losses**2)
    return math.sqrt(max(second - first**2, 1e-300))


def _where(loss: Callable[[float], float], value: float, a: float, end: float) -> float:
    """Where a rising loss has this value, between two places; the second if it stays below."""
    if loss(end) <= value:
        return end
    if loss(a) >= value:
        return a
    return float(optimize.brentq(lambda x: loss(x) - value, a, end, xtol=1e-12))


def _log_sum(logs: np.ndarray) -> float:
    return float(top := logs.max()) + math.log(float(np.exp(logs - top).sum()))
