"""Which numbers a promise can be made of, each range said once. Imports no torch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from hf_dp.errors import ConfigurationError

# exp(1e4) is no number: far below that a budget promises nothing.
_LARGEST_EPSILON = 1e4
# Whoever guesses the 192 bits of a noise stream's key breaks a promise with more probability.
_SMALLEST_DELTA = 2.0**-192
# Its square is still a number.
LARGEST_NOISE = 1e150
# Optimizers square gradients in float32, where a square is between 1e-38 and 1e38.
_SMALLEST_SIZE, LARGEST_SIZE = 1e-15, 1e15
_LARGEST_COUNT = 2**62
# No dataset has so many rows that less would draw any.
_SMALLEST_PROBABILITY = 1e-12
_LONGEST = 200


def is_number(value: object) -> bool:
    """Whether it is a plain number that a float can hold; infinity is one, a bool is none."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: object, at_least: int = 0) -> bool:
    """Whether it is a whole number that memory can count to."""
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= _LARGEST_COUNT


def is_digest(value: object) -> bool:
    """Whether it is a SHA-256, in hexadecimal."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def is_one_of(value: object, known: Iterable[str]) -> bool:
    """Whether it is one of some words."""
    # Arrays and tensors compare in ways of their own.
    return isinstance(value, str) and value in known


def is_noise(value: Any) -> bool:
    """Whether it is a noise multiplier."""
    return is_number(value) and bool(0 <= value <= LARGEST_NOISE)


def is_delta(value: Any) -> bool:
    """Whether it is a delta for some dataset."""
    return is_number(value) and bool(_SMALLEST_DELTA <= value < 1)


def shown(value: object) -> str:
    """For a refusal: `repr`, cut where it is long; a type where it has none (whole numbers of 10^4 digits)."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - whatever it raises belongs to the value
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _as_text(value: object) -> str:
    """Why text that looks like a number, as of an environment variable, is none."""
    return ", which is text, not a number" if isinstance(value, str) else ""


def check_target_epsilon(target_epsilon: object) -> None:
    """Refuse a budget that is no number above 0 and at most 1e4 (`ConfigurationError`)."""
    if not (is_number(target_epsilon) and 0 < target_epsilon <= _LARGEST_EPSILON):  # type: ignore[operator]
        raise ConfigurationError(
            f"target_epsilon={shown(target_epsilon)}{_as_text(target_epsilon)}.",
            why=f"a budget is a number above 0 and at most {_LARGEST_EPSILON:g}; epsilon 0 would allow no use of the "
            "data at all, and a larger one would promise nothing.",
            fix="give a positive epsilon (8 is weak, 1 is strong), or noise_multiplier=0 for no privacy.",
        )


def check_noise_multiplier(noise_multiplier: object) -> None:
    """Refuse a noise multiplier that is no number between 0 and 1e150 (`ConfigurationError`)."""
    if not is_noise(noise_multiplier):
        raise ConfigurationError(
            f"noise_multiplier={shown(noise_multiplier)}{_as_text(noise_multiplier)}.",
            why="it is a standard deviation in units of the clipping norm: finite, not negative, and at most "
            f"{LARGEST_NOISE:g}.",
            fix="give a number such as 1.0, or give a target epsilon and let the noise be calibrated.",
        )


def check_target_delta(target_delta: object) -> None:
    """Refuse a delta that is no number between 2^-192 and 1 (`ConfigurationError`)."""
    if not is_delta(target_delta):
        raise ConfigurationError(
            f"target_delta={shown(target_delta)}{_as_text(target_delta)}.",
            why=f"delta is a probability below 1 (and below 1/n, which is checked with the data), and of at least "
            f"{_SMALLEST_DELTA:.1g}: with more than that, the key of the noise can be guessed.",
            fix="leave it out for n ** -1.1, or give a small number such as 1e-6.",
        )


def is_probability(value: Any) -> bool:
    """Whether units can be sampled with it: above 0, and at most 1."""
    return is_number(value) and bool(0 < value <= 1)


def check_given_probability(sampling_probability: object) -> None:
    """Refuse a sampling probability of the user's own that is no number between 1e-12 and 1 (`ConfigurationError`)."""
    if not (is_probability(sampling_probability) and sampling_probability >= _SMALLEST_PROBABILITY):  # type: ignore[operator]
        raise ConfigurationError(
            f"sampling_probability={shown(sampling_probability)}{_as_text(sampling_probability)}.",
            why=f"each example enters each step with it: it is a number of at least {_SMALLEST_PROBABILITY:g}, and at "
            "most 1.",
            fix="give about the expected batch size divided by a public guess of the number of examples, or leave it "
            "out, where the number of examples may be public.",
        )


def check_max_batch_size(max_batch_size: object) -> None:
    """Refuse a cap on batches that is no whole number of at least 1 (`ConfigurationError`)."""
    if not is_count(max_batch_size, at_least=1):
        raise ConfigurationError(
            f"max_batch_size={shown(max_batch_size)}{_as_text(max_batch_size)}.",
            why="it is the most examples that one step may use: a whole number of at least 1.",
            fix="leave it out, or give the expected batch size and five times its square root.",
        )


def check_clipping_norm(clipping_norm: object) -> None:
    """Refuse a clipping norm that is neither infinite nor a number of ordinary size (`ConfigurationError`)."""
    is_infinite = isinstance(clipping_norm, float) and clipping_norm == math.inf
    if not is_infinite and not (is_number(clipping_norm) and _SMALLEST_SIZE <= clipping_norm <= LARGEST_SIZE):  # type: ignore[operator]
        raise ConfigurationError(
            f"clipping_norm={shown(clipping_norm)}{_as_text(clipping_norm)}.",
            why="it bounds the l2 norm of each example's gradient and sets the size of the noise. Optimizers square "
            f"both in float32: outside {_SMALLEST_SIZE:g} to {LARGEST_SIZE:g} nothing or infinity is left.",
            fix="give a positive number; 1.0 is the usual start, 0.1 is common for large batches.",
        )


def check_seed(seed: object) -> None:
    """Refuse a seed that is neither None nor a count (`ConfigurationError`)."""
    if seed is not None and not is_count(seed):
        raise ConfigurationError(
            f"seed={shown(seed)}.",
            why="it must be None (secret randomness) or a non-negative integer (reproducible, not private).",
            fix="leave it out for a private run.",
        )
