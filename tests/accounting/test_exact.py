"""No claim is below what is true to rounding: of steps, mixtures, releases, and caps at which all draws are tried."""

from __future__ import annotations

import math
import random
from collections import Counter

import dp_accounting as dp
import pytest
from scipy import stats

from hf_dp.accounting import epsilon, step_event, truncated
from hf_dp.accounting.accountants import group_epsilon
from hf_dp.accounting.group import Group
from tests.accounting.exact import Pair, log_delta, log_delta_or_bound

ROUNDING = 1e-7
CAPS = pytest.mark.skipif(truncated.EVENT is None, reason="dp_accounting has no truncated samples")


def steps(q: float, noise: float, times: int, rows: int = 1) -> Pair:
    chances = [math.comb(rows, j) * q**j * (1 - q) ** (rows - j) for j in range(rows + 1)]
    return Pair(noise, tuple((float(j), p) for j, p in enumerate(chances) if p > 0), times=times)


def gaussian(mu: float, eps: float) -> float:
    """Balle and Wang 2018, arXiv:1805.06530, theorem 8, in logarithms."""
    upper, lower = stats.norm.logcdf(mu / 2 - eps / mu), eps + stats.norm.logcdf(-mu / 2 - eps / mu)
    return float(upper + math.log1p(-math.exp(lower - upper)))


def capped(n: int, q: float, most: int, noise: float, times: int, rows: int, others: float) -> Pair:
    """All draws of few examples: `rows` of one person, each of which adds 1, and others that add `others`."""
    with_it, without = Counter[float](), Counter[float]()
    for own in range(rows + 1):
        for rest in range(n - rows + 1):
            drawn = stats.binom.pmf(own, rows, q) * stats.binom.pmf(rest, n - rows, q)
            size = min(most, own + rest)
            for used in range(max(0, size - rest), min(own, size) + 1):
                ways = math.comb(own, used) * math.comb(rest, size - used)
                chance = float(drawn) * ways / math.comb(own + rest, size)
                with_it[used + others * (size - used)] += chance
                without[others * (size - used)] += chance
    return Pair(noise, tuple(with_it.items()), tuple(without.items()), times)


@pytest.mark.parametrize(("noise", "times", "eps"), [(1.0, 1, 3.0), (2.0, 100, 20.0), (1000.0, 10**6, 5.0)])
def test_of_gaussians_it_is_the_closed_form(noise: float, times: int, eps: float) -> None:
    for pair in (steps(1.0, noise, times), steps(1.0, noise * 2, times, rows=2)):
        assert log_delta([pair], eps) == pytest.approx(gaussian(math.sqrt(times) / noise, eps), abs=1e-8)


@pytest.mark.parametrize(
    ("event", "pairs", "delta"),
    [
        pytest.param(
            dp.SelfComposedDpEvent(step_event(0.7, 1e-3), 5000), [steps(1e-3, 0.7, 5000)], 1e-9, marks=pytest.mark.slow
        ),
        (dp.SelfComposedDpEvent(Group(0.1, 2.0, 3).event, 50), [steps(0.1, 2.0, 50, rows=3)], 1e-5),
        pytest.param(
            dp.ComposedDpEvent([dp.GaussianDpEvent(5.0), dp.SelfComposedDpEvent(step_event(1.0, 0.02), 300)]),
            [steps(1.0, 5.0, 1), steps(0.02, 1.0, 300)],
            1e-15,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_claim_is_no_less_and_hardly_more(event: dp.DpEvent, pairs: list[Pair], delta: float) -> None:
    claimed = epsilon(event, delta)
    assert log_delta(pairs, claimed) <= math.log(delta) + ROUNDING
    assert log_delta(pairs, 0.97 * claimed) > math.log(delta)
    weaker = [Pair(one.noise * 0.9, one.with_it, one.without, one.times) for one in pairs]
    assert log_delta(weaker, claimed) > math.log(delta)


@CAPS
@pytest.mark.parametrize("others", [-1.0, 0.0, 0.5])
def test_of_a_cap_no_claim_is_below_what_all_draws_cost(others: float) -> None:
    for most, rows in ((3, 1), (8, 1), (8, 2)):
        run = dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(1.0), 10, 0.2, most), 20)
        claimed = group_epsilon(run, 1e-9, rows)
        assert claimed is not None
        assert log_delta([capped(10, 0.2, most, 1.0, 20, rows, others)], claimed) <= math.log(1e-9) + ROUNDING
        weaker = capped(10, 0.2, most, 0.9, 20, rows, others)
        assert others or most == 3 or log_delta([weaker], claimed) > math.log(1e-9)


def drawn(rng: random.Random) -> tuple[str, float, list[Pair], float]:
    """A mechanism, what is claimed of it at a delta, and what it is made of."""

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    delta = rng.choice([1e-15, 1e-12, 1e-9, 1e-5, 0.1, between(1e-15, 0.1)])
    q = rng.choice([between(1e-9, 1), between(1e-4, 1), 1 - between(1e-9, 0.5)])
    noise, times = rng.choice([between(0.2, 1000), between(0.3, 10)]), int(between(1, 1e7))
    kind = rng.choice(["steps", "all", "rows", "release", "cap"] if truncated.EVENT else ["steps", "all", "rows"])
    if kind == "cap":
        n, rows = rng.randint(3, 12), rng.randint(1, 2)
        q, most, noise, times = rng.uniform(0.05, 0.9), rng.randint(1, n), between(0.4, 5), int(between(1, 200))
        run = dp.SelfComposedDpEvent(truncated.sampled(dp.GaussianDpEvent(noise), n, q, most), times)
        pair = capped(n, q, most, noise, times, rows, rng.choice([-1.0, 0.0, 0.5]))
        return f"{n, q, most, noise, times, rows}", group_epsilon(run, delta, rows) or 0.0, [pair], delta
    rows = rng.choice([2, 4, 16]) if kind == "rows" else 1
    if rows > 1:
        q, noise, times = min(q, 0.9), max(noise, 0.2 * rows), int(between(1, 1e4))
    q = 1.0 if kind == "all" else q
    run = dp.SelfComposedDpEvent(step_event(noise, q), times)
    pairs = [steps(q, noise, times, rows)]
    if kind == "release":
        release = between(0.5, 50)
        run, pairs = dp.ComposedDpEvent([dp.GaussianDpEvent(release), run]), [*pairs, steps(1.0, release, 1)]
    claimed = epsilon(run, delta) if rows == 1 else group_epsilon(run, delta, rows)
    return f"{kind} {q, noise, times, rows}", claimed or 0.0, pairs, delta


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_claim_of_mechanisms_from_usual_to_extreme_is_below(seed: int) -> None:
    rng, held = random.Random(seed), 0
    for _ in range(16):
        name, claimed, pairs, delta = drawn(rng)
        if not math.isfinite(claimed):
            continue
        try:
            found, is_known = log_delta_or_bound(pairs, max(claimed, 1e-12))
        except (ArithmeticError, ValueError):
            continue  # nearly all of its loss is one number, or its orders are too large for this way
        if is_known or found <= math.log(delta):
            held += 1
            assert found <= math.log(delta) + ROUNDING, name
    assert held >= 12
