"""How well scores tell texts that were in the training from texts that were not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from hf_dp.audit.given import Scores, check_confidence, checked
from hf_dp.audit.intervals import Interval, interval

FALSE_POSITIVE_RATES = (0.001, 0.01)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Members found by a threshold.

    Attributes:
        threshold: above it a score is taken for a member's.
        found: members above it.
        wrong: others above it, of all others no more than the false positive rate.
        true_positive_rate: the share of members above it.
        true_positives: in which that share of all like them lies.
        false_positives: in which that of others does: the threshold was chosen by these very others.
    """

    threshold: float
    found: int
    wrong: int
    true_positive_rate: float
    true_positives: Interval
    false_positives: Interval


@dataclass(frozen=True, kw_only=True)
class Membership:
    """What one attack on membership finds. Each interval holds by itself with `confidence`.

    Attributes:
        members, others: how many texts were in, and how many were not.
        confidence: of the intervals.
        auc: how often a member's score is above another's, ties counted half; 1/2 by chance.
        auc_interval: in which that share lies.
        at: by false positive rate, what is found there; None where there are too few others to measure that rate.
    """

    members: int
    others: int
    confidence: float
    auc: float
    auc_interval: Interval
    at: Mapping[float, Found | None]

    @property
    def by_chance(self) -> bool:
        """Whether the interval holds 1/2. No proof that there is nothing to find."""
        low, high = self.auc_interval
        return low <= 0.5 <= high

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        found = {f"{rate:g}": one and dataclasses.asdict(one) for rate, one in self.at.items()}
        return {**dataclasses.asdict(self), "at": found}


def fewest_others(rate: float) -> int:
    """So many others are needed for one of them to be no more than this share."""
    return math.ceil(1 / rate - 1e-9)


def membership(members: Scores, others: Scores, *, confidence: float = 0.95) -> Membership:
    """The AUC of an attack, and how many members it finds where it is hardly ever wrong.

    True positive rates have intervals of Clopper and Pearson. So has the AUC, as if it had been counted on independent
    pairs, as many as the smaller side has texts: it is a mean of such counts (Hoeffding 1963, section 5), and varies no
    more than one of them. So the interval is a bit wide, and has a width where the AUC is 1, or a side is one text;
    DeLong's and the bootstrap's have none there.

    Args:
        members: scores of texts that were in; higher means likelier in.
        others: of texts that were not, which should be of the same kind: drawn by the coin that drew the members.

    Raises:
        ConfigurationError: none, or scores that are NaN; a confidence that is none.

    Source: Carlini et al. 2022, arXiv:2112.03570, section III, for the rates.
    """
    one, two = checked(members, "members"), checked(others, "others")
    check_confidence(confidence)
    few = min(len(one), len(two))
    above = float(stats.rankdata(np.concatenate([one, two]))[: len(one)].sum()) - len(one) * (len(one) + 1) / 2
    auc = above / (len(one) * len(two))
    return Membership(
        members=len(one), others=len(two), confidence=confidence, auc=auc,
        auc_interval=interval(auc * few, few, confidence),
        at={rate: _found(one, two, rate, confidence) for rate in FALSE_POSITIVE_RATES},
    )  # fmt: skip


def _found(members: np.ndarray[Any, Any], others: np.ndarray[Any, Any], rate: float, confidence: float) -> Found | None:
    if len(others) < fewest_others(rate):
        return None
    # No more than `allowed` others are above it; fewer where some are equal to it.
    allowed = math.floor(rate * len(others) + 1e-9)
    threshold = float(np.sort(others)[len(others) - 1 - allowed])
    found, wrong = int((members > threshold).sum()), int((others > threshold).sum())
    return Found(
        threshold=threshold, found=found, wrong=wrong, true_positive_rate=found / len(members),
        true_positives=interval(found, len(members), confidence),
        # Chosen by these others: no threshold with so many above it is counted wrongly too often.
        false_positives=(interval(wrong, len(others), confidence)[0], interval(allowed, len(others), confidence)[1]),
    )  # fmt: skip
