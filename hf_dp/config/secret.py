"""n as a secret: which number of the user's own takes its place, so that nothing follows from n."""

from __future__ import annotations

from typing import Any

from hf_dp.config.ranges import check_given_probability, is_count, shown
from hf_dp.errors import ConfigurationError

# In ledgers, whose dataset_size is n, or none where that is secret.
GIVEN_SIZE = "given_dataset_size"


def check_secret(promise: Any) -> None:
    """Refuse what does not go together with a secret n (`ConfigurationError`); `promise` has the config's fields."""
    q, size = promise.sampling_probability, promise.dataset_size
    if q is None and size is None:
        return
    if q is not None:
        check_given_probability(q)
    if size is not None and not is_count(size, at_least=2):
        raise ConfigurationError(
            f"dataset_size={shown(size)}.",
            why="it stands for the number of training examples, which is secret: a whole number of at least 2.",
            fix="give a public guess of that number, or leave it out, where the number itself may be public.",
        )
    said = f"sampling_probability={q:g}" if size is None else f"dataset_size={size}"
    if q is not None and size is not None:
        raise ConfigurationError(
            f"dataset_size={size} with sampling_probability={q:g}.",
            why="one of them determines the other.",
            fix="leave out one of the two.",
        )
    if promise.max_batch_size is not None:
        raise ConfigurationError(
            f"{said} with max_batch_size={shown(promise.max_batch_size)}.",
            why="what a truncated batch costs follows from n, which is secret then.",
            fix="leave out one of the two.",
        )
    if promise.target_delta is None and size is None:
        raise ConfigurationError(
            f"{said} without target_delta.",
            why="n is secret then, and the default delta, n ** -1.1, would tell it.",
            fix="give target_delta, well below 1 over the most examples that there could be, such as 1e-8.",
        )


def check_given_size(size: int | None, expected_batch_size: float) -> None:
    """Refuse a number in place of n that is below the expected batch (`ConfigurationError`); None is none."""
    if size is not None and size < expected_batch_size:
        raise ConfigurationError(
            f"dataset_size={size}, and an expected batch of {expected_batch_size:g}.",
            why="each example is drawn with the probability expected batch / dataset_size, which is at most 1.",
            fix="lower per_device_train_batch_size x gradient_accumulation_steps x processes (of PrivateRun: "
            f"expected_batch_size) to at most {size}, or guess n as at least that.",
        )
