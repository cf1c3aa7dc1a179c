"""From events to epsilon, by privacy loss distributions (tight) or by Renyi differential privacy (fast)."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dp_accounting as dp
import numpy as np
from dp_accounting import pld as dp_pld
from dp_accounting import rdp as dp_rdp
from dp_accounting.pld import privacy_loss_mechanism
from dp_accounting.rdp import rdp_privacy_accountant

from hf_dp.accounting.composition import StepLoss, composed_epsilon
from hf_dp.accounting.events import Mechanism, from_counts, mechanisms
from hf_dp.config import AccountantName
from hf_dp.errors import ConfigurationError

# Orders close to 1 matter for little noise, where the default's smallest (1.1) can be 30 times too pessimistic.
RDP_ORDERS: tuple[float, ...] = (1.02, 1.05, *rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
# With orders up to 1024 only, no epsilon below about 0.004 could ever be shown.
LARGE_RDP_ORDERS: tuple[float, ...] = (2048, 4096, 8192)

# Cells of the loss grid per standard deviation of one step's privacy loss. Rounding to the grid adds variance of
# about cell**2 / 6 a step, here 4e-4 of the variance that is there. Few steps with little noise also need a grid that
# is fine in itself: each step's loss is rounded up by about cell**2 / 12.
_CELLS_PER_DEVIATION = 20
_LARGEST_WANTED_CELL = 0.02
# Time grows with the cells that one step's loss spans (about 5 microseconds each).
_MAX_STEP_CELLS = 40_000
# Smaller cells drown in float64's rounding; above, exp(cell) loses its digits and then overflows.
_MIN_CELL, _MAX_CELL = 1e-7, 30.0
# Renyi divergences are sums near 1, exact to about this much for each step.
_RDP_ROUNDING = 1e-15
# Each takes about 0.2 s, and up to a second with the others; a training has three at most.
_MOST_DISTRIBUTIONS = 6
# Squares of smaller numbers vanish. Their epsilon is beyond 1e100: as good as infinite.
_MIN_NOISE = 1e-60
_ONE_AT_A_TIME = threading.RLock()


def epsilon(event: dp.DpEvent, delta: float, accountant: AccountantName = "pld") -> float:
    """An upper bound on epsilon at `delta` for everything in `event`, where one unit's contribution is replaced by
    nothing (zero-out).

    Adding or removing a unit costs as much where nothing else of the mechanism changes with it; where the sampling
    probability follows from the number of units, it does (docs/privacy.md).

    "pld" composes privacy loss distributions, rounded up to a grid (Doroshenko et al. 2022, arXiv:2207.04380). The grid
    depends on the mechanisms alone, not on how often they are used, so epsilon grows with every step. Where so fine
    a grid would not fit into memory, where there are more than six different mechanisms (minutes), or where the Renyi
    bound is smaller, that is returned: both are true.
    "rdp" is the Renyi bound (Mironov et al. 2019, arXiv:1908.10530). The distributions of single steps and the Renyi
    bound come from `dp_accounting`, the sum over steps from `composition`, which bounds its rounding.

    Args:
        event: Gaussian mechanisms, Poisson-sampled or not, in any composition.
        delta: strictly between 0 and 1.
        accountant: "pld" or "rdp".

    Returns:
        epsilon >= 0 in nats. Infinity if any part is not private or has no noise.

    Raises:
        ConfigurationError: delta out of range, or an unknown accountant.
        LedgerError: an event that is not known here.
    """
    if not 0 < delta < 1:
        raise ConfigurationError(
            f"delta={delta!r}.",
            why="it is the probability with which the promise may fail: strictly between 0 and 1.",
            fix="use n ** -1.1 for n training examples.",
        )
    if accountant not in ("pld", "rdp"):
        raise ConfigurationError(
            f"accountant={accountant!r}.",
            why="only 'pld' and 'rdp' are known, and an unknown accountant promises nothing.",
            fix="use 'pld' (tight, the default) or 'rdp'.",
        )
    counts = mechanisms(event)
    if counts is None:
        return math.inf
    return _epsilon(_merge_unsampled(counts), float(delta), accountant)


def _merge_unsampled(counts: dict[Mechanism, int]) -> tuple[tuple[Mechanism, int], ...]:
    # Gaussians on the whole dataset compose exactly into one: their precisions add.
    precision = math.fsum(n / noise / noise for (q, noise), n in counts.items() if q == 1)
    sampled = {key: n for key, n in counts.items() if key[0] < 1}
    if precision > 0:
        sampled[1.0, precision**-0.5] = 1
    return tuple(sorted(sampled.items()))


@functools.lru_cache(maxsize=1024)
def _epsilon(counts: tuple[tuple[Mechanism, int], ...], delta: float, accountant: AccountantName) -> float:
    if not counts:
        return 0.0
    if any(q == 1 and not 0 < noise < math.inf for (q, noise), _ in counts):
        return math.inf
    with _quiet(), np.errstate(all="ignore"):
        bound = _rdp_epsilon(counts, delta)
        if accountant == "rdp" or len(counts) > _MOST_DISTRIBUTIONS:
            return bound
        return min(bound, _pld_epsilon(counts, delta))


@contextmanager
def _quiet() -> Iterator[None]:
    # dp_accounting logs a warning for each Renyi order whose series does not converge; it leaves that order out.
    logger = logging.getLogger("absl")
    # Of two threads one would take the other's level for the one to put back.
    with _ONE_AT_A_TIME:
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _rdp_epsilon(counts: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    if min(noise for (_, noise), _ in counts) < _MIN_NOISE:
        return math.inf
    event = from_counts(dict(counts))
    bound = float(dp_rdp.RdpAccountant(RDP_ORDERS).compose(event).get_epsilon(delta))
    # A smaller epsilon has its best order where the slow large orders begin.
    if bound < 0.02:
        bound = min(bound, float(dp_rdp.RdpAccountant(LARGE_RDP_ORDERS).compose(event).get_epsilon(delta)))
    rounding = _RDP_ROUNDING * sum(n for (q, _), n in counts if q < 1)
    return math.inf if math.isnan(bound) else max(bound, math.sqrt(-2 * rounding * math.log(delta)))


def _pld_epsilon(counts: tuple[tuple[Mechanism, int], ...], delta: float) -> float:
    if min(noise for (_, noise), _ in counts) < _MIN_NOISE:
        return math.inf
    scales = {key: _loss_scale(*key) for key, _ in counts}
    cell = min(deviation for deviation, _ in scales.values()) / _CELLS_PER_DEVIATION
    cell = min(cell, _LARGEST_WANTED_CELL)
    cell = max(cell, max(width for _, width in scales.values()) / _MAX_STEP_CELLS, _MIN_CELL)
    if cell > _MAX_CELL:
        return math.inf
    bound = 0.0
    try:
        for adjacency in range(2):
            steps = [(_step_losses(q, noise, cell)[adjacency], n) for (q, noise), n in counts]
            bound = composed_epsilon(steps, cell, delta, at_least=bound)
    except (MemoryError, OverflowError, ValueError, ZeroDivisionError):
        return math.inf
    return math.inf if math.isnan(bound) else bound


@functools.lru_cache(maxsize=8)
def _step_losses(q: float, noise: float, cell: float) -> tuple[StepLoss, StepLoss]:
    """Of one example that is replaced by nothing, and of nothing that is replaced by one."""
    pld = dp_pld.privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=noise, value_discretization_interval=cell, sampling_prob=q
    )
    # Not public; a test holds what is made of them against exact integrals.
    remove, add = (pmf.to_dense_pmf() for pmf in (pld._pmf_remove, pld._pmf_add))
    return _as_step_loss(remove), _as_step_loss(add)


def _as_step_loss(pmf: Any) -> StepLoss:
    return StepLoss(pmf._lower_loss, np.asarray(pmf._probs), pmf._infinity_mass)


def _loss_scale(q: float, noise: float) -> tuple[float, float]:
    """Standard deviation and width of one step's privacy loss, the larger of adding and removing an example."""
    z = np.linspace(-10, 10, 4001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])

    def loss(x: np.ndarray) -> np.ndarray:
        exponent = (x - 0.5 / noise) / noise
        if q == 1:
            return exponent
        small = np.log1p(q * np.expm1(np.minimum(exponent, 30)))
        return np.where(exponent > 30, np.log(q) + exponent, small)

    without, with_it = loss(z), loss(z + 1 / noise)
    removed = _variance(np.concatenate([without, with_it]), np.concatenate([density * (1 - q), density * q]))
    added = _variance(without, density)
    kinds = privacy_loss_mechanism.AdjacencyType
    widths = []
    for kind in (kinds.REMOVE, kinds.ADD) if q < 1 else (kinds.REMOVE,):
        bounds = privacy_loss_mechanism.GaussianPrivacyLoss(
            noise, sampling_prob=q, adjacency_type=kind
        ).connect_dots_bounds()
        widths.append(bounds.epsilon_upper - bounds.epsilon_lower)
    return math.sqrt(max(removed, added)), max(widths)


def _variance(values: np.ndarray, weights: np.ndarray) -> float:
    mean = float(values @ weights)
    return float(((values - mean) ** 2) @ weights)
