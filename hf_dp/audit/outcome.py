"""What an audit of one training found, as it stands in `privacy.json`: the counts, from which the bounds follow."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_dp.audit.guesses import OneRun
from hf_dp.config.ranges import is_count, is_number
from hf_dp.errors import LedgerError, damaged
from hf_dp.figures import lower, percent

# Whoever checks an audit computes its bounds again.
MOST_CANARIES, _MOST_ATTACKS = 100_000, 8
_NAME = re.compile(r"[a-z][a-z ,]{0,60}")
_COUNTS = ("canaries", "guesses", "right", "tried")
LOW = "A low bound says nothing: another attack may do better."
# Of what others read.
LOW_AND_TOLD = f"{LOW} The counts are the word of whoever published them."


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Attacks on the canaries of one training, and what each proves.

    Attributes:
        attacks: by their names, what each found; all bounds hold together with `confidence`.

    Raises:
        LedgerError: none, too many, names that are none, more canaries than are computed with, or bounds that hold
            together with a confidence of a half at most.
    """

    attacks: Mapping[str, OneRun]

    def __post_init__(self) -> None:
        if not 1 <= len(self.attacks) <= _MOST_ATTACKS or not all(map(_NAME.fullmatch, self.attacks)):
            raise damaged("not an audit", f"attacks {str(list(self.attacks))[:200]}")
        if (most := max(found.canaries for found in self.attacks.values())) > MOST_CANARIES:
            raise damaged("not an audit", f"{most} canaries; its bounds are computed for {MOST_CANARIES} at most")
        if not 0.5 < self.confidence < 1:
            raise damaged("not an audit", f"together its bounds have confidence {self.confidence:g}, not above 1/2")

    @property
    def best(self) -> str:
        """The attack with the highest bound."""
        return max(self.attacks, key=lambda name: self.attacks[name].epsilon)

    @property
    def epsilon(self) -> float:
        """The highest bound: that of the training is no smaller, with `confidence`."""
        return self.attacks[self.best].epsilon

    @property
    def confidence(self) -> float:
        """Of all bounds together (a union bound)."""
        return round(1 - math.fsum(1 - found.confidence for found in self.attacks.values()), 12)

    def __str__(self) -> str:
        found = self.attacks[self.best]
        form = " (of a Gaussian mechanism)" if found.mu is not None else ""
        return (
            f"An attack ({self.best}) was right in {found.right} of {found.guesses} guesses about {found.canaries} "
            f"canaries, and shows with confidence {percent(self.confidence)} that epsilon{form} is at least "
            f"{lower(found.epsilon, 3)} at delta {found.delta:g}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON."""
        return {name: dataclasses.asdict(found) for name, found in self.attacks.items()}

    @classmethod
    def from_dict(cls, values: object) -> Audit:
        """The inverse of `to_dict` (`LedgerError` for anything else). Whether the bounds follow is for `verify`."""
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise damaged("not an audit", f"found {str(values)[:100]}")
        return cls(attacks={name: _found(name, one) for name, one in values.items()})


def _found(name: str, values: object) -> OneRun:
    known = {field.name for field in dataclasses.fields(OneRun)}
    if not isinstance(values, dict) or set(values) != known:
        raise _wrong(name, str(values))
    numbers = {key: value for key, value in values.items() if key not in _COUNTS and (key, value) != ("mu", None)}
    is_whole = all(is_count(values[key], at_least=0 if key == "right" else 1) for key in _COUNTS)
    is_finite = all(is_number(value) and 0 <= value < math.inf for value in numbers.values())
    if not (is_whole and is_finite) or not values["right"] <= values["guesses"] <= values["canaries"]:
        raise _wrong(name, str(values))
    found = OneRun(**values)
    least = 0.0 if found.mu is None else math.ulp(0.0)
    if not (0.5 < found.confidence < 1 and least <= found.delta < 1 / found.canaries):
        raise _wrong(name, str(values))
    return found


def _wrong(name: str, found: str) -> LedgerError:
    return damaged("not an audit", f"{name[:60]} is {found[:300]}")
