"""The unit of a mechanism, each kind of it: whose presence is hidden, and how many there are. Plain values, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hf_dp.accounting.neighbours import ADD_OR_REMOVE, ZERO_OUT, ZERO_OUT_EXAMPLES
from hf_dp.config import PrivacyConfig
from hf_dp.config.asked import promised
from hf_dp.config.plain import Terms, refuse_term
from hf_dp.config.promise import PLAIN
from hf_dp.config.ranges import is_count
from hf_dp.config.secret import GIVEN_SIZE
from hf_dp.config.units import MOST_ROWS, is_column


@dataclass(frozen=True, kw_only=True)
class _CountedUnit(Terms):
    """Of which it is public how many there are: what is drawn are whole units."""

    number: int
    adjacency: ClassVar[str] = ZERO_OUT
    apart: ClassVar[int] = 1

    @property
    def drawn(self) -> int:
        return self.number

    def _check(self) -> None:
        if not is_count(self.number, at_least=1):
            refuse_term("number", self.number, "it is a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class ExampleUnit(_CountedUnit):
    """Each training example is a unit of its own.

    Attributes:
        number: n, how many there are.
    """

    kind: str = "example"
    name: ClassVar[str] = "one training example"


@dataclass(frozen=True, kw_only=True)
class UncountedExampleUnit(Terms):
    """Each training example is a unit of its own, and how many there are is secret: nothing may follow from it."""

    kind: str = "uncounted example"
    name: ClassVar[str] = "one training example"
    adjacency: ClassVar[str] = ADD_OR_REMOVE
    apart: ClassVar[int] = 1
    number: ClassVar[None] = None
    drawn: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True)
class ColumnUnit(_CountedUnit):
    """All training examples with one value in a column are a unit together.

    Attributes:
        number: n, how many values there are.
        column: its name.
        max_examples: of one unit in one step.
    """

    column: str
    max_examples: int
    kind: str = "column"

    def _check(self) -> None:
        super()._check()
        _check_column(self)

    @property
    def name(self) -> str:
        return _drawn_whole(self)


@dataclass(frozen=True, kw_only=True)
class UncountedColumnUnit(Terms):
    """As `ColumnUnit`, and how many there are is secret."""

    column: str
    max_examples: int
    kind: str = "uncounted column"
    adjacency: ClassVar[str] = ADD_OR_REMOVE
    apart: ClassVar[int] = 1
    number: ClassVar[None] = None
    drawn: ClassVar[None] = None

    def _check(self) -> None:
        _check_column(self)

    @property
    def name(self) -> str:
        return _drawn_whole(self)


@dataclass(frozen=True, kw_only=True)
class ColumnExamplesUnit(Terms):
    """All training examples that name one value in a column are a unit together, and each is drawn by itself.

    Attributes:
        number: n, how many values there are.
        column: its name.
        max_examples: k, of one unit among those that are drawn from.
        examples: how many are drawn from.
    """

    number: int
    column: str
    max_examples: int
    examples: int
    kind: str = "column, by examples"
    adjacency: ClassVar[str] = ZERO_OUT_EXAMPLES

    def _check(self) -> None:
        ColumnUnit(number=self.number, column=self.column, max_examples=self.max_examples)
        _check_apart(self.max_examples)
        if not is_count(self.examples, at_least=1):
            refuse_term("examples", self.examples, "it is a whole number of at least 1")
        if self.examples > self.number * self.max_examples:
            refuse_term("examples", self.examples, f"there are at most {self.max_examples} of each of {self.number}")

    @property
    def name(self) -> str:
        return (
            f"{_all_of_one(self.column)}, at most {self.max_examples} of them among the {self.examples} that are drawn "
            "from"
        )

    @property
    def apart(self) -> int:
        return self.max_examples

    @property
    def drawn(self) -> int:
        return self.examples


@dataclass(frozen=True, kw_only=True)
class UncountedColumnExamplesUnit(Terms):
    """As `ColumnExamplesUnit`, and how many units and examples there are is secret."""

    column: str
    max_examples: int
    kind: str = "uncounted column, by examples"
    adjacency: ClassVar[str] = ADD_OR_REMOVE
    number: ClassVar[None] = None
    drawn: ClassVar[None] = None

    def _check(self) -> None:
        _check_column(self)
        _check_apart(self.max_examples)

    @property
    def name(self) -> str:
        return f"{_all_of_one(self.column)}, at most {self.max_examples} of them among those that are drawn from"

    @property
    def apart(self) -> int:
        return self.max_examples


# Of each: how many things are `drawn` from, and how many of them, each drawn by itself, are `apart` one unit's.
UnitTerms = (
    ExampleUnit
    | UncountedExampleUnit
    | ColumnUnit
    | UncountedColumnUnit
    | ColumnExamplesUnit
    | UncountedColumnExamplesUnit
)


def unit_terms(number: int | None, config: PrivacyConfig, drawn: int | None = None) -> UnitTerms:
    """The unit that a config promises, of which there are `number` (None if it is secret), with `drawn` examples to
    draw from where each is drawn by itself. Where the sampling probability follows from n, n must be public
    (`ConfigurationError`)."""
    return promised_unit(number, promised(config), drawn)


def promised_unit(number: int | None, asked: Mapping[str, Any], drawn: int | None) -> UnitTerms:
    """The same, given what the config promises, as it stands in ledgers."""
    is_secret = asked.get("sampling_probability", asked.get(GIVEN_SIZE)) is not None
    counted: Any = number
    if asked.get("unit") is None:
        return UncountedExampleUnit() if is_secret else ExampleUnit(number=counted)
    named: Any = {"column": asked["unit"], "max_examples": asked["max_examples_per_unit"]}
    if asked.get("unit_sampling", PLAIN["unit_sampling"]) == "units":
        return UncountedColumnUnit(**named) if is_secret else ColumnUnit(number=counted, **named)
    if is_secret:
        return UncountedColumnExamplesUnit(**named)
    return ColumnExamplesUnit(number=counted, examples=drawn, **named)  # type: ignore[arg-type]


def _drawn_whole(unit: Any) -> str:
    return f"{_all_of_one(unit.column)}, at most {unit.max_examples} in a step"


def _all_of_one(column: str) -> str:
    # The name of a column need not be a word for whose the examples are.
    return f"all training examples with one value of {column!r} together"


def as_said_today(text: str, unit: UnitTerms) -> str:
    """What a record says of a unit, in the words of today; 0.1.0.dev3 took the column's name for a noun."""
    column = getattr(unit, "column", None)
    return (
        text if column is None else text.replace(f"all training examples of one {column} together", _all_of_one(column))
    )


def _check_column(unit: Any) -> None:
    if not is_count(unit.max_examples, at_least=1):
        refuse_term("max_examples", unit.max_examples, "it is a whole number of at least 1")
    if not is_column(unit.column):
        refuse_term("column", unit.column, "it is the short name of a column")


def _check_apart(most: int) -> None:
    if most > MOST_ROWS:
        refuse_term("max_examples", most, f"it is a whole number between 1 and {MOST_ROWS}")
