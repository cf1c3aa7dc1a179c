"""What the noise follows from: a budget in epsilon, a budget in what attacks may find, or the noise itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hf_dp.config.ranges import check_noise_multiplier, check_target_epsilon, is_number, shown
from hf_dp.errors import ConfigurationError
from hf_dp.launched import is_first

# The rate that attacks are mostly compared at.
AT_FPR = 0.01
# Of a million outsiders one. Below, what can be computed of a bound drowns in delta.
_SMALLEST_RATE = 1e-6
_TOLD = ContextVar("_TOLD", default=False)


@contextmanager
def already_told() -> Iterator[None]:
    """Inside nothing is said of a promise without noise: it is a copy, or read, and was told of where it was made."""
    token = _TOLD.set(True)
    try:
        yield
    finally:
        _TOLD.reset(token)


def warn_of_no_noise(noise_multiplier: float | None, stacklevel: int) -> None:
    """Says, on the first rank, what a promise is whose noise is none."""
    if noise_multiplier == 0 and is_first() and not _TOLD.get():
        warnings.warn(
            "noise_multiplier=0: this run adds no noise and is not private; its epsilon is infinite.",
            stacklevel=stacklevel,
        )


def check_target(promise: Any) -> None:
    """Refuse a promise of which no noise, or more than one, follows (`ConfigurationError`).

    Args:
        promise: with the fields that `PrivacyConfig` has.
    """
    budget, noise, found = promise.target_epsilon, promise.noise_multiplier, promise.target_tpr
    if sum(given is not None for given in (budget, noise, found)) != 1:
        besides = "" if found is None else f", with target_tpr={shown(found)}"
        raise ConfigurationError(
            f"PrivacyConfig got target_epsilon={shown(budget)} and noise_multiplier={shown(noise)}{besides}.",
            why="one of them determines the other; with both or neither the promise is ambiguous.",
            fix="give exactly one, for example PrivacyConfig(target_epsilon=8.0).",
        )
    if budget is not None:
        check_target_epsilon(budget)
    if noise is not None:
        check_noise_multiplier(noise)
    check_target_tpr(found, promise.at_fpr)
    if found is not None and promise.accountant == "rdp":
        raise ConfigurationError(
            f"target_tpr={found:g} with accountant='rdp'.",
            why="what an attack may find is computed from privacy loss distributions, the accountant 'pld'.",
            fix="use accountant='pld' (tight, the default), or give target_epsilon.",
        )


def is_target_tpr(found: object, at_fpr: object) -> bool:
    """Whether it is a budget that some noise keeps: above what guessing finds, and below everything."""
    numbers = is_number(found) and is_number(at_fpr)
    return numbers and bool(_SMALLEST_RATE <= at_fpr < found < 1)  # type: ignore[operator]


def check_target_tpr(found: object, at_fpr: object) -> None:
    """Refuse a budget that no noise keeps, or that is half of one (`ConfigurationError`); None is no budget."""
    if found is None and is_number(at_fpr) and at_fpr == AT_FPR:
        return
    if found is None:
        raise ConfigurationError(
            f"at_fpr={shown(at_fpr)} without target_tpr.",
            why="it says at which false positive rate target_tpr holds, and by itself nothing.",
            fix="give target_tpr as well, or leave it out.",
        )
    if not is_target_tpr(found, at_fpr):
        raise ConfigurationError(
            f"target_tpr={shown(found)} at at_fpr={shown(at_fpr)}.",
            why=f"they are shares, at_fpr of at least {_SMALLEST_RATE:g} and target_tpr above it and below 1: who "
            "guesses finds as many members as he wrongly takes others for members, whatever the noise.",
            fix="give for example PrivacyConfig(target_tpr=0.05, at_fpr=0.01): an attack that takes 1 % of the others "
            "for members finds at most 5 % of the members.",
        )


def told(promise: Any) -> str:
    """The budget of a config or a report, as it was given; "no budget" if the noise was."""
    if promise.target_epsilon is not None:
        return f"target_epsilon={promise.target_epsilon}"
    return "no budget" if promise.target_tpr is None else f"target_tpr={promise.target_tpr}, at_fpr={promise.at_fpr}"
