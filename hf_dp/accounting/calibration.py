"""The inverse question: how much noise a budget needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import dp_accounting as dp
from scipy import optimize

from hf_dp.accounting.accountants import epsilon, has_renyi
from hf_dp.accounting.events import check_sampling_probability, check_steps
from hf_dp.accounting.release import Release
from hf_dp.accounting.terms import step_event
from hf_dp.config import AccountantName
from hf_dp.config.asked import Share
from hf_dp.config.ranges import check_target_epsilon
from hf_dp.errors import ConfigurationError

_SMALLEST_NOISE, _LARGEST_NOISE = 1e-4, 1e12
# Relative to epsilon. Epsilon falls at least about as fast as noise grows, so noise is as exact.
_TOLERANCE = 3e-4


def calibrate_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sampling_probability: float,
    steps: int,
    accountant: AccountantName = "pld",
    spent: dp.DpEvent | None = None,
) -> float:
    """The smallest noise multiplier with which a run of Poisson-sampled steps stays within its budget.

    Args, Returns, Raises: as `smallest_noise_multiplier`, and

        sampling_probability: of each unit in each step, in (0, 1].
    """
    check_sampling_probability(sampling_probability)
    return smallest_noise_multiplier(
        lambda noise: step_event(noise, sampling_probability),
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        steps=steps,
        accountant=accountant,
        spent=spent,
    )


def smallest_noise_multiplier(
    step: Callable[[float], dp.DpEvent],
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    accountant: AccountantName = "pld",
    spent: dp.DpEvent | None = None,
) -> float:
    """The smallest noise multiplier with which a whole run stays within its budget.

    The result is never too small: its epsilon was computed and is at most `target_epsilon`. It is at most about
    0.1 % too large.

    Args:
        step: the event of one step, given its noise multiplier.
        target_epsilon: the budget, finite and above 0, in nats.
        target_delta: strictly between 0 and 1; see `check_delta` for what is sensible.
        steps: optimizer steps of the run.
        accountant: "pld" or "rdp".
        spent: what is released besides, and paid for with the same budget.

    Returns:
        The standard deviation of the noise in units of the sensitivity, not below 1e-4: less noise hides nothing.

    Raises:
        ConfigurationError: a value out of range, or a budget so small that this accountant shows it for no noise.
    """
    check_target_epsilon(target_epsilon)
    check_steps(steps)

    def cost(noise: float, by: AccountantName) -> float:
        run = dp.SelfComposedDpEvent(step(noise), steps)
        return epsilon(run if spent is None else dp.ComposedDpEvent([spent, run]), target_delta, by)

    # The Renyi bound takes milliseconds, and its answer is a good first guess at the tight one.
    start = 1.0
    if accountant == "pld" and has_renyi(step(start)):
        start = _smallest_noise(lambda noise: cost(noise, "rdp"), target_epsilon, start, tolerance=0.1) or start
    noise = _smallest_noise(lambda noise: cost(noise, accountant), target_epsilon, start, tolerance=_TOLERANCE)
    if noise is None or not cost(noise, accountant) <= target_epsilon:
        raise ConfigurationError(
            f"target_epsilon={target_epsilon!r} at delta={target_delta!r} with {steps} steps.",
            why=f"no noise multiplier up to {_LARGEST_NOISE:g} is shown to reach it by the {accountant!r} accountant.",
            fix="raise target_epsilon or delta, take fewer steps, or use accountant='pld'.",
        )
    return noise


def paid_releases(
    shares: Sequence[Share], *, target_epsilon: float | None, target_delta: float, accountant: AccountantName = "pld"
) -> tuple[Release, ...]:
    """Each with the noise with which all its times together cost its share of the target epsilon.

    Raises:
        ConfigurationError: no target epsilon, or shares that leave nothing of it.
    """
    labels = ", ".join(share.label for share in shares)
    if shares and target_epsilon is None:
        raise ConfigurationError(
            f"a noise multiplier in place of a target epsilon, with a release of {labels}.",
            why="it is paid for with a share of the target epsilon.",
            fix="give target_epsilon, or do without the release.",
        )
    together = math.fsum(share.budget_share for share in shares)
    if together >= 1:
        raise ConfigurationError(
            f"{labels} take {together:g} of the target epsilon together.",
            why="nothing would be left for the steps.",
            fix="lower budget_share of each so that their sum is well below 1.",
        )
    releases = []
    for share in shares:
        assert target_epsilon is not None
        noise = calibrate_noise_multiplier(
            target_epsilon=share.budget_share * target_epsilon,
            target_delta=target_delta,
            sampling_probability=1.0,
            steps=share.times,
            accountant=accountant,
        )
        releases.append(Release(share.label, step_event(noise, 1.0), share.times, share.every))
    return tuple(releases)


def _smallest_noise(cost: Callable[[float], float], target: float, start: float, *, tolerance: float) -> float | None:
    """The smallest x with cost(x) <= target, for a falling cost; None if there is none."""

    def excess(x: float) -> float:
        ratio = cost(x) / target
        return math.inf if ratio == math.inf else math.log(max(ratio, 1e-9))

    x, stretch = start, 0.6
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    while low is None or high is None:
        value = excess(x)
        # Epsilon is about noise ** -1 where noise is plenty, and falls faster where there is little.
        move = math.exp(min(max(abs(value) * stretch, 0.01 * stretch), 4.0))
        if value > 0:
            low, x = (x, value), x * move
        else:
            high, x = (x, value), x / move
        stretch *= 2
        if low is None and x < _SMALLEST_NOISE:
            return _SMALLEST_NOISE if excess(_SMALLEST_NOISE) <= 0 else high[0] if high else None
        if high is None and x > _LARGEST_NOISE:
            return None
    # A little inside the budget, since only a point inside can be returned.
    root = (
        optimize.brentq(
            lambda log_x: min(excess(math.exp(log_x)), 50.0) + tolerance / 3,
            math.log(low[0]),
            math.log(high[0]),
            xtol=tolerance / 6,
        )
        if high[1] < -tolerance / 3
        else math.log(high[0])
    )
    x = math.exp(root)
    while x < high[0] and excess(x) > 0:
        x *= 1 + tolerance / 3
    return min(x, high[0])
