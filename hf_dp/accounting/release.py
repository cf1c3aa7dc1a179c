"""A release beside the steps, known everywhere by its label: in plans, ledgers, reports and on cards."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp

from hf_dp.accounting.events import event_from_dict, event_to_dict, primitives
from hf_dp.accounting.gaussian import Gaussian
from hf_dp.config.asked import check_times
from hf_dp.errors import ConfigurationError, LedgerError, damaged

# What steps are called in ledgers, and the first query of each.
TRAINING_STEP = "training step"
GRADIENT = "gradient"
# Labels stand on model cards: a name, and no room for a claim in Markdown.
_LABEL = re.compile(r"\w[\w .,()+-]{0,59}")


@dataclass(frozen=True)
class Release:
    """What is released of all units, beside the steps.

    Attributes:
        label: the ledger's key.
        event: what it costs, each time.
        times: how often it was made, or is planned to be.
        every: steps from one to the next; None where all are made before the first step.

    Raises:
        LedgerError: a label that is no short name, or an event that no accountant here interprets.
        ConfigurationError: numbers that are none.
    """

    label: str
    event: dp.DpEvent
    times: int
    every: int | None = None

    def __post_init__(self) -> None:
        check_label(self.label)
        check_times(self.label, self.times, self.every)
        primitives(self.event)

    @property
    def noise_multiplier(self) -> float:
        """Of Gaussian noise: its standard deviation in units of the sensitivity; 0 if it has none."""
        (one,) = primitives(self.event) or (Gaussian(1.0, 0.0),)
        assert isinstance(one, Gaussian)
        return one.noise

    @property
    def is_of_all(self) -> bool:
        """Whether it costs what one use of Gaussian noise on all units does, as whatever a config asks for; or it has
        no noise."""
        used = primitives(self.event)
        if used is None:
            return True
        of_all = [times for one, times in used.items() if isinstance(one, Gaussian) and one.probability == 1]
        return of_all == [1] and len(used) == 1

    def due(self, steps: int) -> int:
        """How often it must have been made when so many steps were."""
        if self.every is None:
            return self.times if steps else 0
        return math.ceil(steps / self.every)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; `from_dict` is the inverse."""
        return {"label": self.label, "event": event_to_dict(self.event), "times": self.times, "every": self.every}

    @classmethod
    def from_dict(cls, values: object) -> Release:
        """The release that `to_dict` wrote.

        Raises:
            LedgerError: anything else.
        """
        if not isinstance(values, dict) or set(values) != {"label", "event", "times", "every"}:
            raise damaged("no release", f"{str(values)[:100]} has not the fields label, event, times and every")
        try:
            return cls(**{**values, "event": event_from_dict(values["event"])})
        except ConfigurationError as error:
            raise damaged("no release", error.found) from error


def check_label(label: object) -> None:
    """Refuse a label that is no short name (`LedgerError`)."""
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise LedgerError(
            f"a release with the label {str(label)[:100]!r}.",
            why="labels stand on model cards, where anything else could pass for a claim.",
            fix="name it in at most 60 letters, digits, blanks and . , ( ) + -, such as 'training step'.",
        )
