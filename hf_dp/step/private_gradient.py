"""One private gradient: record, clip, sum, charge, add noise, divide. Read this first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TypeVar

from torch import nn

from hf_dp.accounting import Ledger
from hf_dp.config.target import told
from hf_dp.errors import BudgetExceededError
from hf_dp.per_example import PerExampleGradients, Pieces
from hf_dp.per_example.checks.memory import unchanged_buffers
from hf_dp.per_example.modules import parameters_of
from hf_dp.randomness import secret_global_state
from hf_dp.step.clipped_sum import ClippedSum, SummedByRows
from hf_dp.step.plan import Plan
from hf_dp.step.unsearched import unsearched

MicroBatch = TypeVar("MicroBatch")


def private_gradient(
    model: nn.Module,
    record: Callable[[MicroBatch], PerExampleGradients],
    micro_batches: Iterable[MicroBatch],
    plan: Plan,
    ledger: Ledger,
    *,
    by_rows: SummedByRows | None = None,
    dummies: Iterable[MicroBatch] = (),
) -> ClippedSum:
    """Sets `.grad` of every trainable parameter to the noisy mean gradient of one logical batch (DP-SGD).

    That of a parameter `by_rows` is sparse: it has noise, and is not zero, in the chosen rows alone.
    Parameters that are not trained have none afterwards.
    On several ranks all call it together, each with its share of the batch, and all get the same gradient.

    Args:
        model: whose trainable parameters are updated.
        record: the per-example gradients of one micro-batch, or those of its units, or of rows of one unit.
        micro_batches: of one Poisson draw, possibly none: an empty batch is a step like any other.
        plan: clipping, noise and cost.
        ledger: charged before the noisy gradient exists.
        by_rows: parameters that are summed by rows, and what chooses these.
        dummies: micro-batches that are computed and weighted with zero, where other ranks have more.

    Returns:
        The sum; its gradients are now the noisy mean.

    Raises:
        BudgetExceededError: the plan's budget pays for no further step; nothing was computed or released.
        UnsupportedModelError: an example changed what is saved with the model; nothing was charged or released.
    """
    if ledger.steps >= plan.budgeted_steps:
        raise BudgetExceededError(
            f"{ledger.steps} private steps were made, as many as were planned for {told(plan.config)}.",
            why="one more step would spend more than was promised.",
            fix="stop here; to train longer, plan more steps from the start (num_train_epochs or max_steps).",
        )
    total, pieces = ClippedSum(model, plan.clipping, by_rows), Pieces(() if by_rows is None else by_rows.names)
    randomness = nullcontext if plan.entropy.reproducible else secret_global_state
    with unchanged_buffers(model), randomness():
        prepared = iter(micro_batches)
        while True:
            with randomness():  # anew, whatever was seeded where the one before was prepared and computed
                if (micro_batch := next(prepared, None)) is None:
                    break
                with unsearched():
                    total.add(pieces.joined(record(micro_batch)))
        pieces.refuse_rest()
        for dummy in dummies:
            with unsearched():
                total.add_nothing(record(dummy))
    step = ledger.steps
    total.meet(step)
    ledger.charge(plan.event)
    total.choose_rows(step)
    total.release(plan.noise, plan.noise_standard_deviation, step)
    total.set_gradients(plan.sampler.expected_batch_size)
    for p in parameters_of(model):
        # An optimizer may hold it, and its gradient be of a backward pass without noise.
        if not p.requires_grad:
            p.grad = None
    return total
