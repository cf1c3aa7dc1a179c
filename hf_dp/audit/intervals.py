"""What a share that was counted says of the share that it is of (Clopper and Pearson 1934)."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

Interval = tuple[float, float]


def least(found: Any, of: Any, level: float) -> Any:
    """The share of which `found` or more of `of` are seen with probability `level`; elementwise, 0 where none was."""
    found = np.asarray(found)
    return np.where(np.equal(found, 0), 0.0, stats.beta.ppf(level, found, of - found + 1))


def most(found: Any, of: Any, level: float) -> Any:
    """The share of which `found` or fewer of `of` are seen with probability `level`; elementwise, 1 where all were."""
    found = np.asarray(found)
    return np.where(np.equal(found, of), 1.0, stats.beta.isf(level, found + 1, of - found))


def interval(found: float, of: int, confidence: float) -> Interval:
    """In which the share lies, with so much confidence. `found` may be a mean of counts, and no whole number."""
    level = (1 - confidence) / 2
    return float(least(found, of, level)), float(most(found, of, level))
