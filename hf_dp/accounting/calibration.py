"""The inverse question: how much noise a budget needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import dp_accounting as dp
from scipy import optimize, stats

from hf_dp.accounting.accountants import epsilon, has_renyi
from hf_dp.accounting.earlier import Earlier, event_of
from hf_dp.accounting.events import check_sampling_probability, check_steps
from hf_dp.accounting.release import Release
from hf_dp.accounting.risk import risk
from hf_dp.accounting.terms import step_event
from hf_dp.config import AccountantName
from hf_dp.config.asked import Share
from hf_dp.config.ranges import check_target_epsilon
from hf_dp.config.target import AT_FPR, check_target_tpr
from hf_dp.errors import BudgetExceededError, ConfigurationError
from hf_dp.figures import upper

SMALLEST_NOISE, _LARGEST_NOISE = 1e-4, 1e12
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
    if accountant == "pld" and has_renyi(step(start)) and (spent is None or has_renyi(spent)):
        start = _smallest_noise(lambda noise: cost(noise, "rdp"), target_epsilon, start, tolerance=0.1) or start
    noise = _smallest_noise(lambda noise: cost(noise, accountant), target_epsilon, start, tolerance=_TOLERANCE)
    if noise is None or not cost(noise, accountant) <= target_epsilon:
        raise ConfigurationError(
            f"target_epsilon={target_epsilon!r} at delta={target_delta!r} with {steps} steps.",
            why=f"no noise multiplier up to {_LARGEST_NOISE:g} is shown to reach it by the {accountant!r} accountant.",
            fix="raise target_epsilon or delta, take fewer steps, or use accountant='pld'.",
        )
    return noise


def noise_for_tpr(
    step: Callable[[float], dp.DpEvent],
    *,
    target_tpr: float,
    at_fpr: float,
    steps: int,
    spent: dp.DpEvent | None = None,
) -> float:
    """The smallest noise multiplier with which no attack on a whole run finds more than `target_tpr`.

    As exact as `smallest_noise_multiplier`, in mu = ppf(target_tpr) - ppf(at_fpr), the distance of the two normal
    distributions that are told apart as well (Dong, Roth and Su 2019, arXiv:1905.02383, definition 2.6).

    Args:
        step, steps, spent: as of `smallest_noise_multiplier`.
        target_tpr, at_fpr: 1e-6 <= at_fpr < target_tpr < 1; see `risk`.

    Raises:
        ConfigurationError: rates out of range, or no noise is shown to keep it.
    """
    check_target_tpr(target_tpr, at_fpr)
    check_steps(steps)

    def most(noise: float) -> float:
        run = dp.SelfComposedDpEvent(step(noise), steps)
        whole = run if spent is None else dp.ComposedDpEvent([spent, run])
        return risk(whole, (at_fpr,)).true_positive_rates[at_fpr]

    noise = _smallest_noise(lambda noise: _mu(most(noise), at_fpr), _mu(target_tpr, at_fpr), 1.0, tolerance=_TOLERANCE)
    if noise is None or not most(noise) <= target_tpr:
        raise ConfigurationError(
            f"target_tpr={target_tpr!r} at at_fpr={at_fpr!r} with {steps} steps.",
            why=f"no noise multiplier up to {_LARGEST_NOISE:g} is shown to keep it.",
            fix="raise target_tpr, or take fewer steps.",
        )
    return noise


def _mu(tpr: float, fpr: float) -> float:
    return float(stats.norm.ppf(tpr) - stats.norm.ppf(fpr))


def calibrated(
    step: Callable[[float], dp.DpEvent],
    *,
    steps: int,
    delta: float,
    shares: Sequence[Share] = (),
    accountant: AccountantName = "pld",
    target_epsilon: float | None = None,
    target_tpr: float | None = None,
    at_fpr: float = AT_FPR,
    noise_multiplier: float | None = None,
    earlier: Sequence[Earlier] = (),
) -> tuple[tuple[Release, ...], float]:
    """What is released beside the steps, and the noise multiplier of the steps, from the one target that is given.

    Of a budget in `target_tpr`, shares are of the epsilon that the steps alone would have under it. What `earlier`
    trainings released is paid first.

    Raises:
        ConfigurationError: as the functions above and below.
        BudgetExceededError: the earlier trainings have spent the target, but perhaps for what calibration left over.
    """
    before = event_of(earlier)

    def noise(spent: dp.DpEvent | None) -> float:
        if target_epsilon is not None:
            return smallest_noise_multiplier(
                step, target_epsilon=target_epsilon, target_delta=delta, steps=steps, accountant=accountant, spent=spent
            )
        assert target_tpr is not None
        return noise_for_tpr(step, target_tpr=target_tpr, at_fpr=at_fpr, steps=steps, spent=spent)

    if before is not None:
        _refuse_spent(before, delta, accountant, target_epsilon, target_tpr, at_fpr)
    budget = target_epsilon
    if shares and target_tpr is not None:
        budget = epsilon(dp.SelfComposedDpEvent(step(noise(before)), steps), delta, accountant)
        if budget == 0:
            raise ConfigurationError(
                f"target_tpr={target_tpr!r} at at_fpr={at_fpr!r}, with a release of "
                f"{', '.join(share.label for share in shares)}.",
                why=f"the steps alone would have no epsilon at delta={upper(delta, 3)} then, and a release is paid for "
                "with a share of it.",
                fix="raise target_tpr, or do without the release.",
            )
    releases = paid_releases(shares, target_epsilon=budget, target_delta=delta, accountant=accountant)
    if noise_multiplier is not None:
        return releases, noise_multiplier
    spent = [] if before is None else [before]
    spent += [dp.SelfComposedDpEvent(release.event, release.times) for release in releases]
    return releases, noise(dp.ComposedDpEvent(spent) if spent else None)


def _refuse_spent(
    before: dp.DpEvent,
    delta: float,
    accountant: AccountantName,
    target_epsilon: float | None,
    target_tpr: float | None,
    at_fpr: float,
) -> None:
    if target_epsilon is not None:
        name, target, spent = "target_epsilon", target_epsilon, epsilon(before, delta, accountant)
        share = spent / target
    elif target_tpr is not None:
        name, target, spent = "target_tpr", target_tpr, risk(before, (at_fpr,)).true_positive_rates[at_fpr]
        share = _mu(spent, at_fpr) / _mu(target, at_fpr)
    else:
        return
    # A training under the whole budget leaves so much of it. Noise to keep to that would drown all that is learnt.
    if share < 1 - _TOLERANCE:
        return
    raise BudgetExceededError(
        f"{name}={target:g}, and on the same people {upper(spent, 4)} was spent before, at delta {upper(delta, 3)}.",
        why="the budget is for all their trainings together, and no noise in this one takes back what was released.",
        fix=f"give a {name} well above {upper(spent, 4)} (hf-dp plan --after says what noise goes with it); or train "
        "the earlier one again with less of the budget.",
    )


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
        if low is None and x < SMALLEST_NOISE:
            return SMALLEST_NOISE if excess(SMALLEST_NOISE) <= 0 else high[0] if high else None
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
