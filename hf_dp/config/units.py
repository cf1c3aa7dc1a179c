"""Whose examples are hidden together: each by itself, or all that name one unit in a column. Imports no torch."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from hf_dp.config.ranges import is_count, is_one_of, shown
from hf_dp.errors import ConfigurationError

UnitSamplingName = Literal["units", "examples"]
# What many examples of one unit cost, where each is drawn by itself, takes seconds to compute, and calibration does it
# a dozen times.
MOST_ROWS = 128
# It is printed, and stands on cards.
_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,59}")


def is_column(name: object) -> bool:
    """Whether a column that names units may be called so."""
    return isinstance(name, str) and _COLUMN.fullmatch(name) is not None


def drawn_are(promise: Any) -> str:
    """What steps draw, and batches count."""
    if promise.unit is None:
        return "examples"
    return "chosen examples" if promise.unit_sampling == "examples" else "units"


def check_unit(promise: Any) -> None:
    """Refuse units that are none, or without a bound on what each step uses of one (`ConfigurationError`); `promise`
    has the config's fields."""
    unit, most, sampling = promise.unit, promise.max_examples_per_unit, promise.unit_sampling
    if not is_one_of(sampling, get_args(UnitSamplingName)):
        raise ConfigurationError(
            f"unit_sampling={shown(sampling)}.",
            why="units are drawn for a step whole, or their examples are, each independently; what another way costs "
            "is not known here.",
            fix="leave it out, or give 'units' or 'examples'.",
        )
    if unit is None:
        if most is not None or sampling != "units":
            alone = f"unit_sampling={shown(sampling)}" if most is None else f"max_examples_per_unit={shown(most)}"
            raise ConfigurationError(
                f"{alone} without unit.",
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
            fix="give for example max_examples_per_unit=4; of a unit with more, so many are drawn in each step (chosen "
            "once, with unit_sampling='examples').",
        )
    if sampling == "examples":
        _check_by_examples(promise, most)


def _check_by_examples(promise: Any, most: Any) -> None:
    """Refuse what is not known of units whose examples are drawn each by itself (`ConfigurationError`)."""
    attention, sparse = promise.re_attention, promise.sparse_embeddings
    released = attention is not None and attention.token_frequencies == "released"
    problems = {
        f"max_examples_per_unit={most}": (
            most > MOST_ROWS,
            "what so many cost takes minutes to compute, and more noise than the units drawn whole",
            f"lower it to at most {MOST_ROWS}, or leave out unit_sampling",
        ),
        f"accountant={promise.accountant!r}": (
            promise.accountant == "rdp" and most > 1,
            "what several examples of one unit cost is known to the accountant 'pld' alone",
            "use accountant='pld' (tight, the default), or leave out unit_sampling",
        ),
        f"max_batch_size={promise.max_batch_size}": (
            promise.max_batch_size is not None and most > 1,
            "how several examples of one unit take the places of others in a full batch has not been worked out",
            "leave out one of the two",
        ),
        "counts of all units, released before or between the steps": (
            released or promise.output_bias is not None or (sparse is not None and sparse.releases_rows),
            "they count units, whose examples are not read together here",
            "leave out unit_sampling or output_bias, or use token_frequencies='public' or 'uniform', or public rows",
        ),
    }
    for what, (is_so, why, fix) in problems.items():
        if is_so:
            raise ConfigurationError(f"unit_sampling='examples' with {what}.", why=f"{why}.", fix=f"{fix}.")
