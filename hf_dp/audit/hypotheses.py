"""How often guesses can be right under a hypothesis about the mechanism: that it keeps an epsilon, or a mu."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

# No epsilon, and no mu, that these bounds can reach with counts that fit into a computer.
_LARGEST = 64.0
_HALVINGS = 40


class Pure:
    """How often so many guesses are right, at most, if the mechanism is (epsilon, delta)-DP (theorem 5.2).

    It grows with epsilon as long as it is below 1/2, as m times delta is below 1.
    """

    def __init__(self, m: int, guesses: int, right: int, delta: float, level: float) -> None:
        self._guesses, self._right, self._doubt, self._level = guesses, right, 2 * m * delta, level
        self._fewer = np.arange(right - 1, -1, -1)
        of_all = special.gammaln(guesses + 1)
        self._ways = of_all - special.gammaln(self._fewer + 1) - special.gammaln(guesses - self._fewer + 1)

    def excludes(self, epsilon: float) -> bool:
        """Whether it is no more often than `level`."""
        each = float(special.expit(epsilon))
        probability = float(special.bdtrc(self._right - 1, self._guesses, each)) if self._right else 1.0
        if self._doubt and probability <= self._level:
            # P[right - i <= W < right] for i = 1, 2, ... of a binomial W.
            logs = self._fewer * math.log(each) - (self._guesses - self._fewer) * np.logaddexp(0, epsilon)
            below = np.exp(self._ways + logs).cumsum()
            probability += self._doubt * float((below / np.arange(1, self._right + 1)).max())
        return probability <= self._level


class Gaussian:
    """Whether a mu-GDP mechanism may let `right` guesses or more be right with probability `level`.

    Let p_j be the probability of j right ones. Turning one canary's coin turns a right guess about it into a wrong one,
    so for each c, with g(x) = Phi(Phi^-1(x) + mu) and averages over canaries and coins (g is concave),
    sum_{j >= c} j p_j / m <= g(sum_{j >= c - 1} (guesses - j) p_j / m). The least mass that fulfils them all is added
    from the top down: mass that is not needed yet does more for the relations below where it lies lower.
    """

    def __init__(self, m: int, guesses: int, right: int, level: float) -> None:
        self._m, self._guesses, self._right, self._level = m, guesses, right, level

    def excludes(self, mu: float) -> bool:
        """Whether it may not."""
        of_right, of_wrong = (n * self._level / self._m for n in (self._right, self._guesses - self._right))
        for c in range(self._right, 0, -1):
            needed = float(special.ndtr(special.ndtri(of_right) - mu))
            if needed <= of_wrong:
                return False  # and so all the way down
            of_right += (c - 1) / (self._guesses - c + 1) * (needed - of_wrong)
            of_wrong = needed
            if (of_right + of_wrong) * self._m > self._guesses:
                return True
        return False


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Of one Gaussian observation at distance `mu`, exactly (Dong, Roth and Su 2019, corollary 2.13); 0 at least.

    Args:
        delta: above 0 where mu is.
    """

    def exceeds(epsilon: float) -> bool:
        apart = special.ndtr(mu / 2 - epsilon / mu)
        return bool(apart - math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)) >= delta)

    return 0.0 if mu <= 0 else largest(exceeds, mu * mu / 2 + mu * 40)


def largest(is_excluded: Callable[[float], bool], high: float = _LARGEST) -> float:
    """The largest number below `high` that is excluded, from below; 0 where none is. All below an excluded one are."""
    low = 0.0
    if not is_excluded(low):
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_excluded(middle) else (low, middle)
    return low
