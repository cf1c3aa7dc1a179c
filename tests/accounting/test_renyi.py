"""The Renyi bound, from few orders, against that of all orders."""

import logging
import math

import numpy as np
import pytest
from dp_accounting import rdp as dp_rdp

from hf_dp.accounting import renyi
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.accounting.renyi import LARGE_RDP_ORDERS, RDP_ORDERS, renyi_epsilon


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("absl").setLevel(logging.ERROR)
    renyi._divergence.cache_clear()
    yield
    logging.getLogger("absl").setLevel(logging.WARNING)


def of_all_orders(counts, delta):
    def at(orders):
        divergences = np.sum([n * dp_rdp.RdpAccountant(orders).compose(one.event).rdp for one, n in counts], axis=0)
        return float(dp_rdp.compute_epsilon(orders, divergences, delta)[0])

    bound = at(RDP_ORDERS)
    if bound < 0.02:
        bound = min(bound, at(LARGE_RDP_ORDERS))
    rounding = 1e-15 * sum(n for one, n in counts if one.is_a_sum)
    return math.inf if math.isnan(bound) else max(bound, math.sqrt(-2 * rounding * math.log(delta)))


@pytest.mark.parametrize(
    ("counts", "delta"),
    [
        ([(Gaussian(512 / 10003, 0.8), 200)], 4e-5),
        ([(Gaussian(0.01, 0.5), 20)], 1e-6),
        ([(Gaussian(0.3, 4.0), 5000)], 1e-5),
        ([(Gaussian(1.0, 3.0), 1)], 1e-5),
        ([(Gaussian(1.0, 2000.0), 1)], 1e-9),
        ([(Gaussian(0.02, 60.0), 30)], 1e-5),
        ([(Gaussian(0.1, 1.0), 100), (Gaussian(0.05, 5.0), 7), (Gaussian(1.0, 10.0), 1)], 1e-6),
        # Between whole orders dp_accounting's divergences are no convex function, nor a rising one.
        ([(Gaussian(0.3616512573351933, 8.275769987567207), 2356)], 6.969725571848519e-05),
        ([(Gaussian(0.06716470156399107, 3.7306953524803297), 594026730)], 3.852021915910031e-10),
        # One use that hardly ever happens, and then tells everything: the smallest orders alone give 0.
        ([(Gaussian(1e-12, 0.1), 1)], 1e-5),
        ([(Gaussian(1e-6, 0.7), 3)], 1e-4),
    ],
)
def test_few_orders_give_what_all_orders_give(counts, delta):
    with np.errstate(all="ignore"):
        assert renyi_epsilon(tuple(counts), delta) == of_all_orders(counts, delta)


def test_orders_that_cannot_decide_are_not_computed():
    renyi_epsilon(((Gaussian(512 / 10003, 0.8), 200),), 4e-5)
    assert renyi._divergence.cache_info().currsize < len(RDP_ORDERS) / 4


def test_the_advantage_of_one_use_is_that_of_its_losses():
    one = Gaussian(0.2, 1.3)
    remove, _ = one.losses(1e-3)
    losses = 1e-3 * np.arange(remove.lowest, remove.lowest + len(remove.masses))
    assert one.advantage == pytest.approx(float(remove.masses @ -np.expm1(-losses).clip(max=0)), rel=1e-3)
    assert one.advantage <= one.probability
