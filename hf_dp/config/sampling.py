"""What a promise may ask of sampling. Imports no torch."""

from __future__ import annotations

from typing import Any

from hf_dp.config.ranges import check_max_batch_size
from hf_dp.errors import ConfigurationError


def check_sampling(most: Any, accountant: object) -> None:
    """Refuse a largest batch that no accountant knows the cost of (`ConfigurationError`); `most` is None for none."""
    if most is None:
        return
    check_max_batch_size(most)
    if accountant == "rdp":
        raise ConfigurationError(
            f"max_batch_size={most} with accountant='rdp'.",
            why="what a truncated batch costs is known to the accountant 'pld' alone.",
            fix="use accountant='pld' (tight, the default), or leave out max_batch_size.",
        )
