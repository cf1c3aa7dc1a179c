"""What the user chooses of an output that starts from released frequencies. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hf_dp.config.part import PartConfig
from hf_dp.config.ranges import LARGEST_SIZE, is_number, shown
from hf_dp.errors import ConfigurationError


@dataclass(frozen=True)
class OutputBiasConfig(PartConfig):
    """The output layer's bias starts as the log of how often each token is a label, which is released once.

    Attributes:
        budget_share: of the target epsilon, for the release; in (0, 1).
        presence_clipping_norm: l2 norm to which each example's 0/1 vector of labels is clipped for the release; the
            square root of the number of different labels that an example may count in full. 1 for one label each.

    Raises:
        ConfigurationError: a value outside these.
    """

    budget_share: float = 0.2
    presence_clipping_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, limit in (("budget_share", 1.0), ("presence_clipping_norm", LARGEST_SIZE)):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < limit):
                raise ConfigurationError(
                    f"OutputBiasConfig got {name}={shown(value)}.",
                    why=f"it must be a number above 0 and below {limit:g}.",
                    fix="leave it out for the default.",
                )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `OutputBiasConfig(**config.to_dict()) == config`."""
        return dataclasses.asdict(self)
