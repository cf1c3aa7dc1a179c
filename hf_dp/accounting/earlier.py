"""Trainings before this one, on data of the same people: what they released is in this one's ledger, and its budget.

Sequential composition: epsilon and delta of all together hold for whoever has at most one unit in each of the data
sets, whatever the others hold, and also where later trainings look at what earlier ones released.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp

from hf_dp.accounting.events import check_delta
from hf_dp.accounting.ledger import Ledger
from hf_dp.accounting.release import Release, check_label
from hf_dp.accounting.terms import terms_from_dict
from hf_dp.accounting.units import UnitTerms
from hf_dp.config.ranges import check_target_delta, is_digest, is_number
from hf_dp.errors import ConfigurationError, damaged
from hf_dp.figures import upper

# Kinds of release of one training, and trainings; adding up thousands takes minutes.
_MOST = 16
_LABEL = re.compile(r"earlier [0-9]+, .*")


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A training before, as its record tells of it.

    Attributes:
        name: of its folder or repository.
        record_sha256: of its `privacy.json`.
        unit: whose presence it hides, and how many there are where that is public.
        epsilon: that it claims, with the trainings before it; infinite without noise.
        delta: of that claim.
        reproducible: sampling or noise follow from a seed, of it or of a training before it.
        releases: all that it released, its steps too, under labels of this ledger.

    Raises:
        ConfigurationError, LedgerError: numbers out of range, or names that are none.
    """

    name: str
    record_sha256: str
    unit: UnitTerms
    epsilon: float
    delta: float
    reproducible: bool
    releases: tuple[Release, ...]

    def __post_init__(self) -> None:
        check_label(self.name)
        check_target_delta(self.delta)
        is_whole = is_digest(self.record_sha256) and is_number(self.epsilon) and self.epsilon >= 0
        if not (is_whole and isinstance(self.reproducible, bool) and len(self.releases) <= _MOST):
            raise ConfigurationError(
                f"an earlier training {self.name!r} with record {self.record_sha256!r}, epsilon {self.epsilon!r}, "
                f"reproducible={self.reproducible!r} and {len(self.releases)} kinds of release.",
                why="what it spent would not be known.",
                fix="use a record as hf_dp wrote it.",
            )

    def in_words(self) -> str:
        """For readers of a report. Records are held against these words, whichever version wrote them."""
        number = "a secret number of" if self.unit.number is None else f"{self.unit.number}"
        return (
            f"{self.name}: epsilon {upper(self.epsilon, 4)} at delta {upper(self.delta, 3)} when it had ended, "
            f"of {number} units ({self.unit.name}, {self.unit.adjacency}); SHA-256 of its record {self.record_sha256}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for strict JSON; `from_dict` is the inverse."""
        releases = [release.to_dict() for release in self.releases]
        epsilon = self.epsilon if self.epsilon < float("inf") else "inf"
        return {**vars(self), "epsilon": epsilon, "unit": self.unit.to_dict(), "releases": releases}

    @classmethod
    def from_dict(cls, values: object) -> Earlier:
        """The training that `to_dict` wrote.

        Raises:
            LedgerError: anything else.
        """
        if not isinstance(values, Mapping) or set(values) != set(cls.__dataclass_fields__):
            raise damaged("no earlier training", f"it has not its fields: {str(values)[:100]}")
        if not isinstance(values["releases"], list):
            raise damaged("no earlier training", f"its releases are no list: {str(values['releases'])[:100]}")
        releases = tuple(Release.from_dict(release) for release in values["releases"])
        epsilon = float("inf") if values["epsilon"] == "inf" else values["epsilon"]
        try:
            unit = terms_from_dict("unit", values["unit"])
            return cls(**{**values, "epsilon": epsilon, "unit": unit, "releases": releases})
        except ConfigurationError as error:
            raise damaged("no earlier training", error.found) from error


def is_of_earlier(label: str) -> bool:
    """Whether a ledger charges under it what an earlier training released."""
    return _LABEL.fullmatch(label) is not None


def released_by(ledger: Ledger, place: int) -> tuple[Release, ...]:
    """All that the training of a ledger released, and none before it, under labels that tell it from others.

    Args:
        place: of the training among the earlier ones, from 1.
    """
    made: dict[tuple[str, str], Release] = {}
    for event, count, own in ledger.entries:
        if not is_of_earlier(own):
            key = own, repr(event)
            made[key] = Release(f"earlier {place}, {own}", event, count + (made[key].times if key in made else 0))
    return tuple(made.values())


def charge(ledger: Ledger, earlier: Sequence[Earlier]) -> None:
    """Charges what of the earlier trainings is not in the ledger yet."""
    made = {(one.label, repr(one.event)): one.times for one in ledger.releases}
    for release in releases_of(earlier):
        missing = release.times - made.get((release.label, repr(release.event)), 0)
        if missing > 0:
            ledger.charge(release.event, release.label, missing)


def releases_of(earlier: Sequence[Earlier]) -> list[Release]:
    """All that they released."""
    return [release for one in earlier for release in one.releases]


def event_of(earlier: Sequence[Earlier]) -> dp.DpEvent | None:
    """What they cost together; None if there are none."""
    spent = [dp.SelfComposedDpEvent(one.event, one.times) for one in releases_of(earlier)]
    return dp.ComposedDpEvent(spent) if spent else None


def check_number(earlier: int) -> None:
    """Refuse more earlier trainings than can be added up soon (`ConfigurationError`)."""
    if earlier > _MOST:
        raise ConfigurationError(
            f"{earlier} trainings before this one.",
            why=f"of more than {_MOST} adding up what they cost takes minutes.",
            fix="plan fewer and longer ones.",
        )


def check_same_people(earlier: Sequence[Earlier], unit: UnitTerms) -> None:
    """Refuse units that are not hidden alike in all trainings (`ConfigurationError`)."""
    check_number(len(earlier))
    for one in earlier:
        if _kind(one.unit) != _kind(unit):
            raise ConfigurationError(
                f"a training with the unit {_told(unit)}, after {one.name!r} with {_told(one.unit)}.",
                why="one epsilon for both is about one kind of unit, and neighbouring data sets that differ alike.",
                fix="train both with the same unit (the column of the same name), and n public in both or secret in "
                "both.",
            )


def delta_after(earlier: Sequence[Earlier], delta: float, *, is_given: bool) -> float:
    """A delta that holds for the units of the earlier trainings as well.

    Args:
        delta: for the units of the training after them.
        is_given: by the user; otherwise it is at most that of each earlier training. A given one is below 1 over their
            number too; where that is secret, it is at most theirs.

    Raises:
        ConfigurationError: a given delta that means nothing for them.
    """
    if not is_given:
        return min([delta, *(one.delta for one in earlier)])
    for one in earlier:
        check_delta_of(one, delta)
    return delta


def check_delta_of(one: Earlier, delta: float) -> None:
    """Refuse a delta that means nothing for the units of an earlier training (`ConfigurationError`)."""
    if one.unit.number is not None:
        check_delta(delta, one.unit.number, f"units of the training before, {one.name!r}")
    elif delta > one.delta:
        raise ConfigurationError(
            f"delta={delta:g} after {one.name!r}, whose delta is {one.delta:g}.",
            why="the number of its units is secret, and that 1 over it is above a larger delta is not known.",
            fix=f"leave out target_delta, or give at most {one.delta:g}.",
        )


def _kind(unit: UnitTerms) -> tuple[str, str | None]:
    return unit.kind, getattr(unit, "column", None)


def _told(unit: UnitTerms) -> str:
    return f"{unit.name!r} ({unit.adjacency})"
