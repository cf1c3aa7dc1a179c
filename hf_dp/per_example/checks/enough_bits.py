"""Holding gradients against one another in float32, and before a refusal in float64: rounding refuses nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import nn

from hf_dp.errors import PreflightError
from hf_dp.per_example.batch import Batch, LossFunction, take
from hf_dp.per_example.checks.independence import NoDropout, draws_numbers, forked_rng
from hf_dp.per_example.checks.numbers import Numbers
from hf_dp.per_example.checks.padding import in_either_mode
from hf_dp.per_example.checks.preflight import off_zero
from hf_dp.per_example.precision import computed_in, with_memory_to_spare

_Found = TypeVar("_Found")


def in_enough_bits(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    refuse_moved: Callable[[Batch, torch.dtype, Numbers], None],
) -> None:
    """Lets `refuse_moved` look at a batch in float32, and where it refuses it, in float64.

    With dropout off, in the mode that the model is in; of a model that draws other random numbers, in eval mode, where
    all examples have the same ones. Parameters that are all zero are moved off it.

    Args:
        refuse_moved: given the batch in so many bits, which these are, and the random numbers of so many examples. Any
            error but `PreflightError` says nothing.

    Raises:
        PreflightError: in float32, and not found wrong in float64.
    """
    numbers: Numbers = nullcontext

    def refuse_in(dtype: torch.dtype) -> None:
        def refuse(sparing: bool) -> None:
            with computed_in(model, batch, dtype, checkpointed=True, sparing=sparing) as exact:
                refuse_moved(exact, dtype, numbers)

        with_memory_to_spare(refuse)

    def refuse_any(drawn_within: Numbers) -> None:
        nonlocal numbers
        numbers = drawn_within
        try:
            refuse_in(torch.float32)
        except PreflightError as found:
            # A small difference of large numbers is rounded by more than the tolerance.
            if not computed(is_the_same_in_float64):
                raise found from None

    def is_the_same_in_float64() -> bool:
        refuse_in(torch.float64)
        return True

    with forked_rng(model), off_zero(model), NoDropout():
        in_either_mode(model, refuse_any, lambda: draws_numbers(model, loss_fn, take(batch, [0])))


def computed(check: Callable[[], _Found]) -> _Found | None:
    """What `check` finds, or None where what is strange cannot be computed."""
    try:
        return check()
    except torch.OutOfMemoryError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - a model, a loss or a hook may refuse such a row in any way
        return None
