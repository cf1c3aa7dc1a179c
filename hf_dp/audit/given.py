"""What bounds are computed from: scores, and numbers, that mean something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_dp.config.ranges import is_number, shown
from hf_dp.errors import ConfigurationError

Scores = Sequence[float] | np.ndarray[Any, Any]


def checked(values: Scores, name: str) -> np.ndarray[Any, Any]:
    """(N,) float64, N at least 1, without NaN (`ConfigurationError`)."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or np.isnan(scores).any():
        found = f"shape {scores.shape}" if scores.ndim != 1 or not len(scores) else f"{np.isnan(scores).sum()} NaN"
        raise refused(
            f"{name} with {found}",
            "one score of each canary, or training, is needed; what has none cannot be sorted among the others.",
            "give a sequence of numbers; where a score failed, its lowest value if that does not depend on the coin.",
        )
    return scores


def check_numbers(delta: float, confidence: float) -> None:
    """Refuses what is no delta or no confidence (`ConfigurationError`)."""
    if not (is_number(delta) and 0 <= delta < 1 and is_number(confidence) and 0.5 < confidence < 1):
        raise refused(
            f"delta={shown(delta)}, confidence={shown(confidence)}",
            "delta is a probability, and confidence the share of audits that are right, above a half.",
            "give delta of the claim, and a confidence such as 0.95.",
        )


def check_confidence(confidence: float) -> None:
    """Refuses what is no confidence (`ConfigurationError`)."""
    if not (is_number(confidence) and 0.5 < confidence < 1):
        raise refused(
            f"confidence={shown(confidence)}",
            "it is the share of intervals that hold what is true, above a half.",
            "give a confidence such as 0.95.",
        )


def refused(found: str, why: str, fix: str) -> ConfigurationError:
    """Scores from which nothing could follow."""
    return ConfigurationError(f"{found}.", why=why, fix=fix)
