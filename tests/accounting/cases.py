"""Mechanisms of each kind that is charged, from the ordinary to the extreme, with what they are made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import dp_accounting as dp

from hf_dp.accounting import step_event, truncated
from hf_dp.accounting.group import Group
from hf_dp.accounting.truncated import Truncated
from tests.accounting import lower_bounds
from tests.accounting.lower_bounds import Mixture, alone, sampled

DELTAS = (1e-5, 1e-9, 1e-12)


@dataclass(frozen=True)
class Case:
    """A run, and what a bound is claimed for.

    Attributes:
        kind: of its event.
        name: its numbers.
        event: as it is charged.
        mixtures: what is released with a unit, how often, with the same noise in every part; without it is noise.
        delta: at which epsilon is claimed.
        plain: sampling probability, noise multiplier and steps, if it is plain steps alone.
    """

    kind: str
    name: str
    event: dp.DpEvent
    mixtures: tuple[tuple[Mixture, int], ...]
    delta: float
    plain: tuple[float, float, int] | None = None

    def lower_delta(self, epsilon: float) -> float:
        """What no claim of this epsilon can have less of, in the worse of the two directions."""
        return max(lower_bounds.delta(steps, h, epsilon) for steps, h in self._both())

    def lower_epsilon(self, below: float) -> float:
        """What no claim at this delta can be less than, up to `below`."""
        found = 0.0
        for steps, h in self._both():
            found = max(found, lower_bounds.epsilon(steps, h, self.delta, below))
            if found > 0.998 * below:
                break  # the other direction can hardly have more
        return found

    def _both(self) -> Iterator[tuple[list[lower_bounds.Step], float]]:
        pairs = [(m, alone(m.noise), n) for m, n in self.mixtures]
        h = lower_bounds.grid_of(pairs)
        steps = [lower_bounds.step_of(*pair, h) for pair in pairs]
        yield steps, h
        yield [lower_bounds.reversed_(step, h) for step in steps], h


def poisson(q: float, noise: float, steps: int, delta: float) -> Case:
    event = dp.SelfComposedDpEvent(step_event(noise, q), steps)
    kind = "Poisson-sampled Gaussian" if q < 1 else "Gaussian"
    name = f"q {q:g}, noise {noise:g}, {steps} steps"
    return Case(kind, name, event, ((sampled(q, noise), steps),), delta, (q, noise, steps))


def several(q: float, noise: float, steps: int, rows: int, delta: float) -> Case:
    event = dp.SelfComposedDpEvent(Group(q, noise, rows).event, steps)
    name = f"q {q:g}, noise {noise:g}, {steps} steps, {rows} rows of one unit"
    return Case("mixture of Gaussians", name, event, ((sampled(q, noise, rows), steps),), delta)


def capped(n: int, q: float, most: int, noise: float, steps: int, delta: float) -> Case:
    """What is known of it from below: others who add nothing, and one that is used as often as it is kept."""
    event = dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(noise), n, q, most), steps)
    one = Truncated(n, q, most, noise)
    used = q * (1 - one.full) + one.full * one.kept
    name = f"q {q:g} of {n}, at most {most}, noise {noise:g}, {steps} steps"
    return Case("truncated", name, event, ((sampled(used, noise), steps),), delta)


def composed(delta: float) -> Iterator[Case]:
    """Steps with releases, and steps of two kinds."""
    for q, noise, steps, release in ((0.05, 0.8, 200, 10.0), (1e-3, 0.5, 3000, 3.0)):
        event = dp.ComposedDpEvent([dp.GaussianDpEvent(release), dp.SelfComposedDpEvent(step_event(noise, q), steps)])
        parts = ((sampled(1.0, release), 1), (sampled(q, noise), steps))
        yield Case(
            "composition", f"q {q:g}, noise {noise:g}, {steps} steps, a release {release:g}", event, parts, delta
        )
    runs = [(0.02, 1.0, 300), (0.2, 3.0, 100)]
    event = dp.ComposedDpEvent([dp.SelfComposedDpEvent(step_event(noise, q), n) for q, noise, n in runs])
    parts = tuple((sampled(q, noise), n) for q, noise, n in runs)
    yield Case("composition", "q 0.02, noise 1, 300 steps, and q 0.2, noise 3, 100 steps", event, parts, delta)


RUNS = (
    *itertools.product((1.0,), (0.1, 1.0, 20.0), (1, 100)),
    *itertools.product((0.5, 0.1), (0.5, 2.0), (1, 100)),
    *itertools.product((0.01,), (0.4, 0.8, 3.0), (1, 2000)),
    *itertools.product((1e-4,), (0.35, 0.7, 2.0), (10_000, 1_000_000)),
    *itertools.product((1e-7,), (0.3,), (1_000_000,)),
    (0.999, 1.0, 10),
)


def all_cases() -> Iterator[Case]:
    """The whole grid."""
    for delta in DELTAS:
        yield from (poisson(*run, delta) for run in RUNS)
        yield from (several(*run, delta) for run in ((0.05, 0.8, 40, 4), (0.01, 1.0, 500, 16), (0.3, 2.0, 20, 2)))
        if truncated.EVENT is not None:
            for most in (271, 256, 240):
                yield capped(20_000, 0.01, most, 0.6, 1000, delta)
        yield from composed(delta)
