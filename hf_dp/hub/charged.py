"""Were all steps charged as a claim says?"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dp_accounting as dp

from hf_dp.accounting import TRAINING_STEP, GaussianNoise, Ledger, SamplingTerms, UnitTerms
from hf_dp.accounting.group import EVENT as SEVERAL_ROWS
from hf_dp.accounting.group import Group
from hf_dp.config.ranges import is_number

# The same computation on another machine.
TOLERANCE = 1e-6


def charged_with(event: dp.DpEvent, otherwise: float) -> float:
    """The sampling probability of a step's event; `otherwise` of one that has none."""
    if isinstance(event, SEVERAL_ROWS):
        found = Group.of(event)
        return otherwise if found is None else found.probability
    probability: float = getattr(event, "sampling_probability", otherwise)
    return probability


def steps_are(
    ledger: Ledger,
    sampling: SamplingTerms,
    noise_multiplier: float,
    unit: UnitTerms,
    n: int | None,
    *,
    one_stage: bool,
) -> bool:
    """Whether all training steps were charged with this noise, and the last with this sampling.

    Args:
        unit: of the steps.
        n: how many are drawn from, or what stands for it; None where the sampling probability does.
        one_stage: all with this probability, as under a budget. Otherwise earlier ones may have had another expected
            batch size, which is a whole number of the n examples; where n is secret, q is the same in all of them.
    """
    steps = [event for event, _, label in ledger.entries if label == TRAINING_STEP]
    inner = GaussianNoise(multiplier=noise_multiplier).event()
    for event in steps:
        drawn = sampling
        if not one_stage and n is not None and event is not steps[-1]:
            expected = n * charged_with(event, sampling.probability)
            if not (1 <= round(expected) <= n and same(expected, float(round(expected)))):
                return False
            drawn = dataclasses.replace(sampling, probability=round(expected) / n)
        if event != drawn.event(inner, unit):
            return False
    return True


def same(one: Any, two: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two plain values are equal, but for rounding."""
    if is_number(one) and is_number(two):
        return math.isclose(one, two, rel_tol=tolerance)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name], tolerance) for name in one)
    return type(one) is type(two) and bool(one == two)
