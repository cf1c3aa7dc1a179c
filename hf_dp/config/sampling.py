"""What a promise may ask of sampling. Imports no torch."""

from __future__ import annotations

from typing import Any

from hf_dp.config.ranges import check_given_probability, check_max_batch_size, shown
from hf_dp.errors import ConfigurationError


def check_sampling(probability: Any, most: Any, delta: object, accountant: object) -> None:
    """Refuse what no sampler draws, or no accountant knows the cost of (`ConfigurationError`).

    Args:
        probability: of the user's own; None where it follows from n.
        most: the largest batch, or None.
        delta: None where it follows from n.
    """
    if probability is not None:
        check_given_probability(probability)
        if most is not None:
            raise ConfigurationError(
                f"sampling_probability={probability:g} with max_batch_size={shown(most)}.",
                why="what a truncated batch costs follows from n, which is secret then.",
                fix="leave out one of the two.",
            )
        if delta is None:
            raise ConfigurationError(
                f"sampling_probability={probability:g} without target_delta.",
                why="n is secret then, and the default delta, n ** -1.1, would tell it.",
                fix="give target_delta, well below 1 over the most examples that there could be, such as 1e-8.",
            )
    if most is not None:
        check_max_batch_size(most)
        if accountant == "rdp":
            raise ConfigurationError(
                f"max_batch_size={most} with accountant='rdp'.",
                why="what a truncated batch costs is known to the accountant 'pld' alone.",
                fix="use accountant='pld' (tight, the default), or leave out max_batch_size.",
            )
