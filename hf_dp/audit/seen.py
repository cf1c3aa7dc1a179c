"""What steps are seen to do, held against what is charged: draws, what each example adds, and the noise.

No attack, and no bound on epsilon: statistics of steps whose noise is next to nothing, or next to all. They show what
attacks on weights cannot, such as one parameter among many that gets no noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import fft, stats

from hf_dp.figures import upper

Numbers = np.ndarray[Any, np.dtype[np.float64]]
# That one of all tests finds an honest training odd.
FALSE_ALARM = 1e-6
# Relative, to which an example adds what it adds alone; it has to be far above the noise there.
_ALIKE = 0.01
# Fewer numbers of a tensor have too wide a distribution to tell much.
_MOST_SHAPES = 100_000


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One thing that was looked at.

    Attributes:
        what: it is.
        found: what was seen, beside what is charged.
        p: how often an honest training is seen so, or as far off, at most.
    """

    what: str
    found: str
    p: float


def odd(seen: Sequence[Seen]) -> list[Seen]:
    """What no honest training would show, but one of a million (Bonferroni)."""
    # What is not a number is odd, too.
    return [one for one in seen if not one.p >= FALSE_ALARM / len(seen)]


def contributions(added: Numbers, alone: Numbers, probability: float) -> list[Seen]:
    """What examples with a direction of their own add to the sums of steps that have next to no noise.

    Of counts the laws of large numbers are taken: where two steps have fewer than some hundred examples in common, what
    is rare is less so than `p` says.

    Args:
        added: (steps, m), the length that each step's sum has in the direction of each example, in units of C.
        alone: (m,), what each adds by itself, clipped; well above the noise.
        probability: with which each is drawn for each step, independently; below 1.
    """
    times = added / alone
    drawn = times > _ALIKE
    z = standard_draws(added, alone, probability)
    wrong = drawn & (np.abs(times - 1) > _ALIKE) | (times < -_ALIKE)
    most = float(added.max())
    steps, m = z.shape
    count, spread = int(drawn.sum()), 2 + (1 / probability / (1 - probability) - 6) / steps
    by_step, by_example = z.sum(1) / math.sqrt(m), z.sum(0) / math.sqrt(steps)
    return [
        Seen(
            what="what an example adds to a sum",
            found=f"at most {most:.4g} C; {int(wrong.sum())} of {count} times other than alone",
            p=float(not wrong.any() and most <= 1 + _ALIKE),
        ),
        Seen(
            what="how often examples are drawn",
            found=f"{drawn.mean():.4g} of all times, charged {probability:.4g}",
            p=float(stats.binomtest(count, drawn.size, probability).pvalue),
        ),
        Seen(
            what="how much batches differ in size",
            found=f"{np.square(by_step).mean():.3g} of the variance of independent draws",
            p=_two_sided(stats.chi2(steps), float(np.square(by_step).sum())),
        ),
        Seen(
            what="how much examples differ in how often they are drawn",
            found=f"{np.square(by_example).mean():.3g} of the variance of independent draws",
            p=_of_squares(float(np.square(by_example).sum()), m, spread),
        ),
        _correlation("draws of neighbouring examples", z[:, 1:], z[:, :-1]),
        _correlation("draws of an example in one step and the next", z[1:], z[:-1]),
    ]


def standard_draws(added: Numbers, alone: Numbers, probability: float) -> Numbers:
    """(steps, m), who was drawn: of mean 0 and variance 1 where it is with that probability. Args: `contributions`."""
    drawn = (added / alone > _ALIKE).astype(np.float64)
    return (drawn - probability) / np.float64(math.sqrt(probability * (1 - probability)))


def in_common(what: str, one: Numbers, other: Numbers) -> Seen:
    """What two trainings have in common that should have nothing: a seed, whichever generator it is of.

    Args:
        what: is compared.
        one, other: of the same shape, of mean 0 and variance 1.
    """
    return _correlation(f"{what} of one training beside those of another", one, other)


def noise(released: Mapping[str, Numbers]) -> list[Seen]:
    """What steps release whose examples add next to nothing beside the noise.

    Args:
        released: by parameter (steps, numbers), in units of the standard deviation that is charged; some thousand
            numbers together, as correlations of fewer are larger than a normal law has them.
    """
    seen = []
    for name, values in released.items():
        # Each step by itself: it is of no use that another has more.
        squares = np.square(values).sum(1)
        least = int(squares.argmin())
        seen.append(
            Seen(
                what=f"noise on {name}",
                found=f"{math.sqrt(squares[least] / values.shape[1]):.4g} of the standard deviation that is charged",
                p=_least_of(len(squares), float(stats.chi2.cdf(squares[least], values.shape[1]))),
            )
        )
    whole = np.concatenate([*released.values()], axis=1)
    seen += _between_steps(whole)
    seen += [*_within_steps(whole), *_between_parameters(released)]
    every = whole.ravel()
    few = every[:: -(-len(every) // _MOST_SHAPES)]
    largest = float(np.abs(every).max())
    seen += [
        Seen(
            what="the distribution of the noise",
            found=f"a distance of {(tested := stats.kstest(few, 'norm')).statistic:.3g} from a normal one",
            p=float(tested.pvalue),
        ),
        Seen(
            what="the largest noise",
            found=f"{largest:.3g} standard deviations in {len(every)} numbers",
            p=math.erf(largest / math.sqrt(2)) ** len(every),
        ),
    ]
    return seen


def charged(steps: int, counted: int, epsilon: float, at_least: float) -> list[Seen]:
    """What a report says of steps that were taken.

    Args:
        steps: that were.
        counted: that it counts.
        epsilon: that it has.
        at_least: that of the steps, by their sampling and noise.
    """
    return [
        Seen(what="steps that are charged", found=f"{counted}, taken {steps}", p=float(counted == steps)),
        Seen(
            what="epsilon of the report",
            found=f"{upper(epsilon, 4)}, of the steps {upper(at_least, 4)}",
            p=float(epsilon >= at_least * (1 - 1e-9)),
        ),
    ]


def _between_steps(values: Numbers) -> list[Seen]:
    pairs = list(itertools.combinations(range(len(values)), 2))
    found = [(_z(values[one], values[two]), one, two) for one, two in pairs]
    if not found:
        return []
    z, one, two = max(found, key=lambda each: abs(each[0]))
    return [
        Seen(
            what="noise of one step beside that of another",
            found=f"correlation {z / math.sqrt(values.shape[1]):.3g} of steps {one} and {two}",
            p=_least_of(len(pairs), _of_normal(z)),
        )
    ]


def _within_steps(values: Numbers) -> list[Seen]:
    """Each number beside that some places on, for every distance."""
    n = values.shape[1]
    if n < 2:
        return []
    # Circular: as many pairs at each distance, but for half of the way round, where there are half as many, each twice.
    moved = np.stack([fft.irfft(np.abs(fft.rfft(step)) ** 2, n)[1 : n // 2 + 1] for step in values]) / math.sqrt(n)
    if n % 2 == 0:
        moved[:, -1] /= math.sqrt(2)
    step, place = np.unravel_index(int(np.abs(moved).argmax()), moved.shape)
    z = float(moved[step, place])
    return [
        Seen(
            what="noise of one number beside that of others in a step",
            found=f"correlation {z / math.sqrt(n):.3g} at a distance of {place + 1} numbers",
            p=_least_of(moved.size, _of_normal(z)),
        )
    ]


def _between_parameters(released: Mapping[str, Numbers]) -> list[Seen]:
    """Parameters of different sizes, from the beginning of each."""
    found = []
    for (one, a), (two, b) in itertools.combinations(released.items(), 2):
        size = min(a.shape[1], b.shape[1])
        found.append((_z(a[:, :size].ravel(), b[:, :size].ravel()), size * len(a), one, two))
    if not found:
        return []
    z, size, one, two = max(found, key=lambda each: abs(each[0]))
    return [
        Seen(
            what="noise of one parameter beside that of another",
            found=f"correlation {z / math.sqrt(size):.3g} of {one} and {two}",
            p=_least_of(len(found), _of_normal(z)),
        )
    ]


def _correlation(what: str, one: Numbers, two: Numbers) -> Seen:
    z = _z(one.ravel(), two.ravel())
    return Seen(what=what, found=f"correlation {z / math.sqrt(max(1, one.size)):.3g}", p=_of_normal(z))


def _z(one: Numbers, two: Numbers) -> float:
    """Of two (n,) of mean 0 and variance 1: normal if they are independent."""
    return float(one @ two) / math.sqrt(max(1, len(one)))


def _of_normal(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))


def _two_sided(law: Any, value: float) -> float:
    # In this order what is not a number stays so.
    return min(2 * min(float(law.cdf(value)), float(law.sf(value))), 1.0)


def _of_squares(value: float, number: int, spread: float) -> float:
    """Of a sum of so many, of mean 1 and variance `spread`: of chi-squared with its two moments, as they are skewed."""
    # One step of half of all: each square is 1.
    return 1.0 if spread < 1e-9 else _two_sided(stats.chi2(2 * number / spread), 2 * value / spread)


def _least_of(number: int, p: float) -> float:
    return min(number * p, 1.0)
