"""From events to epsilon, by privacy loss distributions (tight) or by Renyi differential privacy (fast)."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import dp_accounting as dp
import numpy as np

from hf_dp.accounting.composition import StepLoss, composed_deltas, composed_epsilon
from hf_dp.accounting.events import primitives
from hf_dp.accounting.kinds import Primitive
from hf_dp.accounting.renyi import Counts, renyi_epsilon
from hf_dp.config import AccountantName
from hf_dp.errors import ConfigurationError

# Cells of the loss grid per standard deviation of one step's privacy loss. Rounding to the grid adds variance of
# about cell**2 / 6 a step, here 4e-4 of the variance that is there. Few steps with little noise also need a grid that
# is fine in itself: each step's loss is rounded up by about cell**2 / 12.
_CELLS_PER_DEVIATION = 20
_LARGEST_WANTED_CELL = 0.02
# Time grows with the cells that one step's loss spans (about 5 microseconds each).
_MAX_STEP_CELLS = 40_000
# Smaller cells drown in float64's rounding; above, exp(cell) loses its digits and then overflows.
_MIN_CELL, _MAX_CELL = 1e-7, 30.0
# Each takes about 0.2 s, and up to a second with the others; a training has three at most.
_MOST_DISTRIBUTIONS = 6
_ONE_AT_A_TIME = threading.RLock()
# What a grid that is too fine, or numbers that are too large for one, end in.
_NO_GRID = (MemoryError, OverflowError, ValueError, ZeroDivisionError)


def epsilon(event: dp.DpEvent, delta: float, accountant: AccountantName = "pld") -> float:
    """An upper bound on epsilon at `delta` for everything in `event`, where one unit's contribution is replaced by
    nothing (zero-out).

    Adding or removing a unit costs as much where nothing else of the mechanism changes with it; where the sampling
    probability follows from the number of units, it does (docs/privacy.md).

    "pld" composes privacy loss distributions, rounded up to a grid (Doroshenko et al. 2022, arXiv:2207.04380). The grid
    depends on the mechanisms alone, not on how often they are used, so epsilon grows with every step. Where so fine
    a grid would not fit into memory, where there are more than six different mechanisms (minutes), or where the Renyi
    bound is smaller, that is returned, where there is one: both are true.
    "rdp" is the Renyi bound (Mironov et al. 2019, arXiv:1908.10530). The distributions of single steps and the Renyi
    bound come from `dp_accounting`, the sum over steps from `composition`, which bounds its rounding.

    Args:
        event: mechanisms of `kinds`, in any composition.
        delta: strictly between 0 and 1.
        accountant: "pld" or "rdp".

    Returns:
        epsilon >= 0 in nats. Infinity if any part is not private or has no noise.

    Raises:
        ConfigurationError: delta out of range, an unknown accountant, or "rdp" of an event that it does not have.
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
    counts = primitives(event)
    if counts is None:
        return math.inf
    if accountant == "rdp" and not all(one.has_renyi for one in counts):
        raise ConfigurationError(
            "accountant='rdp' for batches with a hard cap, or units whose examples are drawn each by itself.",
            why="dp_accounting has no Renyi divergence of a truncated Poisson sample, nor of a mixture of Gaussians.",
            fix="use accountant='pld', or leave out max_batch_size, or unit_sampling='examples'.",
        )
    return _epsilon(_merged(counts), float(delta), accountant)


def group_epsilon(event: dp.DpEvent, delta: float, rows: int) -> float | None:
    """An upper bound on epsilon at `delta` for a person with `rows` rows, all replaced by nothing, by "pld".

    Returns:
        epsilon >= 0 in nats, infinity where no bound is found; None of mechanisms of which it is not known.

    Raises:
        LedgerError: an event that is not known here.
    """
    counts = primitives(event)
    if counts is None:
        return math.inf
    merged = _merged(counts)
    grown = [(one.of_group(rows), n) for one, n in merged]
    if any(one is None for one, _ in grown):
        return None
    return math.inf if len(grown) > _MOST_DISTRIBUTIONS else _epsilon(tuple(grown), float(delta), "pld")


def has_renyi(event: dp.DpEvent) -> bool:
    """Whether the accountant "rdp" has an epsilon for everything in `event`.

    Raises:
        LedgerError: an event that is not known here.
    """
    return all(one.has_renyi for one in primitives(event) or ())


def is_composed(event: dp.DpEvent) -> bool:
    """Whether "pld" composes distributions; of more different mechanisms its epsilon is the Renyi bound.

    Raises:
        LedgerError: an event that is not known here.
    """
    return len(_merged(primitives(event) or {})) <= _MOST_DISTRIBUTIONS or not has_renyi(event)


def _merged(counts: Mapping[Primitive, int]) -> Counts:
    found: list[tuple[Primitive, int]] = []
    for kind in sorted({type(one) for one in counts}, key=lambda kind: kind.__name__):
        merged = kind.merged({one: n for one, n in counts.items() if type(one) is kind})
        found += sorted(merged.items())
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _epsilon(counts: Counts, delta: float, accountant: AccountantName) -> float:
    if not counts:
        return 0.0
    # Two that are finite can be merged into one that is not.
    if not all(one.is_finite for one, _ in counts):
        return math.inf
    with _quiet(), np.errstate(all="ignore"):
        if not all(one.has_renyi for one, _ in counts):
            return _pld_epsilon(counts, delta)
        bound = renyi_epsilon(counts, delta)
        if accountant == "rdp" or len(counts) > _MOST_DISTRIBUTIONS:
            return bound
        return min(bound, _pld_epsilon(counts, delta))


@contextmanager
def _quiet() -> Iterator[None]:
    # dp_accounting logs a warning for each Renyi order whose series does not converge; it leaves that order out.
    logger = logging.getLogger("absl")
    # Of two threads one would take the other's level for the one to put back.
    with _ONE_AT_A_TIME:
        level, handlers = logger.level, list(logging.root.handlers)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            # absl gives the root one before it looks at a level; a program's own basicConfig would then do nothing.
            if not handlers:
                logging.root.handlers.clear()


def _pld_epsilon(counts: Counts, delta: float) -> float:
    bound = 0.0
    try:
        for steps, cell in _directions(counts):
            bound = composed_epsilon(steps, cell, delta, at_least=bound)
    except _NO_GRID:
        return math.inf
    return math.inf if math.isnan(bound) else bound


def _directions(counts: Counts) -> Iterator[tuple[list[tuple[StepLoss, int]], float]]:
    """Losses on a grid, and its width, of one unit less and of one more; none where so fine a grid does not fit."""
    scales = [one.scale() for one, _ in counts]
    cell = min(deviation for deviation, _ in scales) / _CELLS_PER_DEVIATION
    cell = min(cell, _LARGEST_WANTED_CELL)
    cell = max(cell, max(width for _, width in scales) / _MAX_STEP_CELLS, _MIN_CELL)
    if cell > _MAX_CELL:
        raise OverflowError(cell)
    for adjacency in range(2):
        yield [(one.losses(cell)[adjacency], n) for one, n in counts], cell


def deltas(event: dp.DpEvent, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds on delta at each of `epsilons`, from 0, in the two directions.

    Returns:
        Of outcomes with a unit's contribution against those without it, and the reverse: both shaped as `epsilons`.
        From privacy loss distributions; 1 where those of the event do not fit into memory.

    Raises:
        LedgerError: an event that is not known here.
    """
    counts = primitives(event)
    if counts is None:
        return np.ones_like(epsilons), np.ones_like(epsilons)
    return _deltas(_merged(counts), tuple(map(float, epsilons)))


@functools.lru_cache(maxsize=64)
def _deltas(counts: Counts, epsilons: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    at = np.array(epsilons)
    ones = np.ones_like(at)
    if not counts:
        return 0 * ones, 0 * ones
    if not all(one.is_finite for one, _ in counts) or len(counts) > _MOST_DISTRIBUTIONS:
        return ones, ones
    with _quiet(), np.errstate(all="ignore"):
        try:
            with_it, without = (composed_deltas(steps, cell, at) for steps, cell in _directions(counts))
        except _NO_GRID:
            return ones, ones
    return np.fmin(with_it, 1.0), np.fmin(without, 1.0)
