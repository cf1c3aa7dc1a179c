"""Whose examples are hidden together: each by itself, or all that name one unit in a column. Imports no torch."""

from __future__ import annotations

import re
from typing import Literal, get_args

from hf_dp.config.ranges import is_count, is_one_of, shown
from hf_dp.errors import ConfigurationError

UnitSamplingName = Literal["units"]
# It is printed, and stands on cards.
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,59}")


def is_column(name: object) -> bool:
    """Whether a column that names units may be called so."""
    return isinstance(name, str) and _COLUMN.fullmatch(name) is not None


def check_unit(unit: object, most: object, sampling: object, hides_n: bool) -> None:
    """Refuse units that are none, or without a bound on what each step uses of one (`ConfigurationError`).

    Args:
        unit: the column, or None.
        most: the bound, or None.
        sampling: how their examples are drawn.
        hides_n: whether the number of units is secret.
    """
    if not is_one_of(sampling, get_args(UnitSamplingName)):
        raise ConfigurationError(
            f"unit_sampling={shown(sampling)}.",
            why="units are drawn for a step whole, each independently; what another way of drawing costs is not known "
            "here.",
            fix="leave it out, or give 'units'.",
        )
    if unit is None:
        if most is not None:
            raise ConfigurationError(
                f"max_examples_per_unit={shown(most)} without unit.",
                why="each training example is a unit of its own then, and nothing would be bounded.",
                fix="give unit= the column that says whose each example is, such as 'user', or leave it out.",
            )
        return
    if not is_column(unit):
        raise ConfigurationError(
            f"unit={shown(unit)}.",
            why="it is the column of the dataset that says whose each example is, and its name stands in the claim: a "
            "letter or _, then letters, digits, '_', '.' or '-', 60 at most.",
            fix="rename the column (dataset.rename_column), for example to 'user', and give that.",
        )
    if not is_count(most, at_least=1):
        raise ConfigurationError(
            f"unit={shown(unit)} with max_examples_per_unit={shown(most)}.",
            why="it is the most examples of one unit that a step uses: a whole number of at least 1.",
            fix="give for example max_examples_per_unit=4; of a unit with more, so many are drawn in each step.",
        )
    if hides_n:
        raise ConfigurationError(
            f"unit={shown(unit)} with sampling_probability or dataset_size.",
            why="the number of units is secret then, and that claim is made of single examples alone so far.",
            fix="leave these out, where the number of units may be public, or leave out unit.",
        )
