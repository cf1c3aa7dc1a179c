"""Epsilon by Renyi divergences, from `dp_accounting`, at no more orders than can decide it.

Each order gives a true bound, and the smallest is the answer. A divergence D takes up to milliseconds, and there are
158; but (order - 1) D(order) is convex and 0 at order 1 (van Erven and Harremoes 2014, arXiv:1206.2459, corollary 2),
so the lines through those that are known tell how small the bounds of other orders can be at best. What is left out is
never the smallest: the answer is, bit for bit, that of all orders. Only whole orders are known in this sense: between
them `dp_accounting` has bounds on divergences, up to twice as large as these.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable

from dp_accounting import rdp as dp_rdp
from dp_accounting.rdp import rdp_privacy_accountant

from hf_dp.accounting.kinds import Primitive

Counts = tuple[tuple[Primitive, int], ...]

# Orders close to 1 matter for little noise, where the default's smallest (1.1) can be 30 times too pessimistic.
RDP_ORDERS: tuple[float, ...] = (1.02, 1.05, *rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
# With orders up to 1024 only, no epsilon below about 0.004 could ever be shown.
LARGE_RDP_ORDERS: tuple[float, ...] = (2048, 4096, 8192)
# Computed first: quick, and they tell most of all the others.
_FIRST = (2, 3, 4, 5, 6, 8, 16, 32)
# Renyi divergences are sums near 1, exact to about this much for each step.
_ROUNDING = 1e-15
# An order is left out where it falls short by more than this, relatively, and what rounding may do to the lines.
_CLEARLY = 1e-9


def renyi_epsilon(counts: Counts, delta: float) -> float:
    """An upper bound on epsilon at `delta`, in nats; infinity where none is found.

    Args:
        counts: mechanisms that have Renyi divergences, and how often each is used.
        delta: strictly between 0 and 1.
    """
    bounds = _Bounds(counts, delta)
    bound = bounds.smallest(RDP_ORDERS)
    # A smaller epsilon has its best order where the slow large orders begin.
    if bound < 0.02:
        bound = bounds.smallest((*RDP_ORDERS, *LARGE_RDP_ORDERS))
    rounding = _ROUNDING * sum(n for one, n in counts if one.is_a_sum)
    return math.inf if math.isnan(bound) else max(bound, math.sqrt(-2 * rounding * math.log(delta)))


class _Bounds:
    """On epsilon, by divergences of all uses together, each computed when it may decide."""

    def __init__(self, counts: Counts, delta: float) -> None:
        self._counts, self._delta = counts, delta
        self._rounding = 100 * _ROUNDING * sum(n for _, n in counts)
        self._found: dict[float, float] = {}
        # What is known, at whole orders, rising, and where it is finite: (order - 1) D.
        self._orders, self._logs = [1.0], [0.0]
        # Where one use alone tells members from others better than delta does, no bound is 0 but by rounding.
        self._tells = max(one.advantage for one, _ in counts) > max(delta * (1 + _CLEARLY), 1e-6)

    def smallest(self, orders: Iterable[float]) -> float:
        """Of the bounds at `orders`; not a number if one that was computed is none."""
        left = set(orders) - self._found.keys()
        for order in left.intersection(_FIRST):
            self._compute(order)
        while left := left - self._found.keys():
            best = min(self._found.values(), default=math.inf)
            at_least = {order: self._at_least(order) for order in left}
            order = min(left, key=at_least.__getitem__)
            if at_least[order] > best + _CLEARLY * (1 + abs(best)) + self._rounding:
                break
            self._compute(order)
        return math.nan if any(map(math.isnan, self._found.values())) else min(self._found.values())

    def _compute(self, order: float) -> None:
        divergence = 0.0
        for one, n in self._counts:
            divergence += n * _divergence(one, order)
        self._found[order] = float(dp_rdp.compute_epsilon((order,), (divergence,), self._delta)[0])
        if float(order).is_integer() and math.isfinite(divergence):
            place = bisect.bisect(self._orders, order)
            self._orders.insert(place, order)
            self._logs.insert(place, (order - 1) * divergence)

    def _at_least(self, order: float) -> float:
        if not self._tells:
            return -math.inf
        place = bisect.bisect(self._orders, order)
        log = max(0.0, self._line(place - 2, order), self._line(place, order))
        return log / (order - 1) + math.log1p(-1 / order) - math.log(self._delta * order) / (order - 1)

    def _line(self, first: int, order: float) -> float:
        """Through two neighbours that are known, of which `order` lies on one side."""
        if not 0 <= first < len(self._orders) - 1:
            return 0.0
        (a, b), (at_a, at_b) = self._orders[first : first + 2], self._logs[first : first + 2]
        return at_a + (at_b - at_a) / (b - a) * (order - a)


@functools.lru_cache(maxsize=16384)
def _divergence(one: Primitive, order: float) -> float:
    """Of one use, which takes longer than all that is made of it."""
    return float(dp_rdp.RdpAccountant((order,)).compose(one.event).rdp[0])
