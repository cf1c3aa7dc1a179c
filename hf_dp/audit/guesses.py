"""Lower bounds on epsilon from one training with many canaries, each in or out by a coin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from hf_dp.audit.given import Scores, check_numbers, checked, refused
from hf_dp.audit.hypotheses import Gaussian, Pure, epsilon_of_mu, largest

# That fair coins fall as unevenly.
_UNFAIR = 1e-9


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """What guesses about the canaries of one training prove, with `confidence`: epsilon at `delta` is no smaller.

    Small, it says nothing: the attack may have been weak.

    Attributes:
        epsilon: the lower bound, in nats; 0 where there is none.
        delta: at which it holds.
        confidence: of such audits, the share (at least) in which a mechanism that keeps its epsilon stays above it.
        canaries: how many were in or out by a coin each.
        guesses: about how many of them the attack said something.
        right: how often it was right.
        tried: among how many ways to guess this one was the best; the bound holds for all of them together.
        mu: of a Gaussian mechanism, where that was the question: then epsilon is that of mu at `delta`.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int
    tried: int
    mu: float | None = None

    def again(self) -> OneRun:
        """The same, from the counts alone."""
        return _bounded(
            [(self.guesses, self.right)], self.canaries, self.delta, self.confidence, self.tried,
            gaussian=self.mu is not None,
        )  # fmt: skip


def one_run(included: Scores, excluded: Scores, *, delta: float, confidence: float = 0.95) -> OneRun:
    """A lower bound on epsilon from one training, of any mechanism.

    Canaries are sorted by their scores; the k highest are said to be in, and either the k lowest to be out, or nothing
    is said of the others, for k = m/2, m/4, m/8 ... of m. Each of these ways to guess is held against 1 - confidence
    over their number, so that the best of them may be taken (Bonferroni). Ties are broken at random.

    Source: Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, theorem 5.2.

    Args:
        included: scores of the canaries that were in; higher means likelier in.
        excluded: of those that were not. Which were was decided by fair coins, independent of each other and of all
            else in the training; each is a unit of its own, and scores know of the coins what the training tells.
        delta: of the claim; below one over the number of canaries.

    Raises:
        ConfigurationError: scores from which nothing could follow.
    """
    return _one_run(included, excluded, delta, confidence, gaussian=False)


def gaussian_one_run(included: Scores, excluded: Scores, *, delta: float, confidence: float = 0.95) -> OneRun:
    """A lower bound on mu of a mechanism that is mu-GDP, and so on its epsilon: tighter, and about less.

    What it speaks against is that the mechanism hides each canary as well as one Gaussian observation at distance `mu`.
    That is the claim where every unit is in every step (mu = sqrt(steps) / noise multiplier); under sampling, where the
    trade-off of the claim is no Gaussian one, it says nothing of the claimed epsilon. Guesses as in `one_run`.

    Source: the relation between the counts of right guesses of Mahloujifar, Melis and Chaudhuri 2024, arXiv:2410.22235,
    for the trade-off functions of Dong, Roth and Su 2019, arXiv:1905.02383, section 2.

    Args, Raises: as `one_run`.
    """
    if delta == 0:
        raise refused("delta=0 of a Gaussian mechanism", "at 0 no epsilon holds for it.", "give delta of the claim.")
    return _one_run(included, excluded, delta, confidence, gaussian=True)


def _one_run(included: Scores, excluded: Scores, delta: float, confidence: float, *, gaussian: bool) -> OneRun:
    one, two = checked(included, "included"), checked(excluded, "excluded")
    m = len(one) + len(two)
    check_numbers(delta, confidence)
    if delta >= 1 / m:
        raise refused(
            f"delta={delta:g} with {m} canaries",
            "a mechanism with this delta may give one of so many away.",
            f"give delta of the claim, below {1 / m:.3g}.",
        )
    if 2 * stats.binom.cdf(min(len(one), len(two)), m, 0.5) < _UNFAIR:
        raise refused(
            f"{len(one)} canaries included and {len(two)} excluded",
            "each must be in by a fair coin, which next to never falls so.",
            "draw the coins with hf_dp.audit.plant, and give the scores of all canaries.",
        )
    # Not in the order of the arguments, which tells who was in.
    shuffled = np.random.default_rng().permutation(m)
    scores, is_in = np.concatenate([one, two])[shuffled], np.arange(m)[shuffled] < len(one)
    highest_first = is_in[np.argsort(-scores, kind="stable")]
    right_in, right_out = np.cumsum(highest_first), np.cumsum(~highest_first[::-1])
    sizes = [m >> halvings for halvings in range(1, m.bit_length()) if m >> halvings >= _fewest(1 - confidence)]
    guesses = [(k, int(right_in[k - 1])) for k in sizes] + [
        (2 * k, int(right_in[k - 1] + right_out[k - 1])) for k in sizes
    ]
    if not guesses:
        raise refused(
            f"{m} canaries",
            "had all guesses about them been right, it would prove nothing.",
            "plant a hundred or more, each a unit of its own.",
        )
    return _bounded(guesses, m, delta, confidence, len(guesses), gaussian=gaussian)


def _fewest(level: float) -> int:
    """Guesses, all of them right, that coins alone would make less often."""
    return math.ceil(-math.log2(level)) + 1


def _bounded(
    guesses: list[tuple[int, int]], m: int, delta: float, confidence: float, tried: int, *, gaussian: bool
) -> OneRun:
    level = (1 - confidence) / tried
    best = 0.0, guesses[0]
    for said, right in guesses:
        at_most = Gaussian(m, said, right, level) if gaussian else Pure(m, said, right, delta, level)
        if not best[0] or at_most.excludes(best[0]):
            best = max(best, (largest(at_most.excludes), (said, right)))
    bound, (said, right) = best
    return OneRun(
        epsilon=epsilon_of_mu(bound, delta) if gaussian else bound, delta=delta, confidence=confidence, canaries=m,
        guesses=said, right=right, tried=tried, mu=bound if gaussian else None,
    )  # fmt: skip
