"""The same answer from a loop over single examples: the truth that the engine is held against."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_dp.per_example.batch import Batch, LossFunction, batch_size, check_losses, take
from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.ieee import beneath_modes, full_precision
from hf_dp.per_example.norms import squared_norms
from hf_dp.per_example.precision import accumulation
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.rows import RowSum, SparseLookups, row_factors
from hf_dp.per_example.sharding import local, summed_over_shards, trainable

# So many of a few examples are different ones, which is enough to tell them from one another.
DIFFERENT = 3


def loop(model: nn.Module, loss_fn: LossFunction, batch: Batch, *, tables: Collection[str] = ()) -> PerExampleGradients:
    """Per-example gradients by plain autograd, one example at a time; B times the gradient's memory.

    Args and errors as for `record`. Each example is run alone, so nothing can leak between examples. With `tables`,
    whose gradients are kept as rows, the batch is a single example. Of a parameter that FSDP2 shards the rows are this
    rank's part; all ranks call it together, with the same batch.
    """
    parameters = trainable(model)
    kept = {name: p.grad for name, p in parameters.items()}
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
    losses = []
    factors: dict[str, list[Factors]] = {}
    try:
        for i in range(batch_size(batch)):
            for p in parameters.values():
                p.grad = None
            with torch.enable_grad(), SparseLookups([parameters[n] for n in tables]) if tables else nullcontext():
                loss = loss_fn(model, take(batch, [i]))
                check_losses(loss, 1)
                loss.sum().backward()
            losses.append(loss.detach())
            with beneath_modes():
                for name, p in parameters.items():
                    if name in tables:
                        factors[name] = [] if p.grad is None else [row_factors(p.grad)]
                    else:
                        gradient = torch.zeros_like(local(p)) if p.grad is None else local(p.grad)
                        rows[name].append(accumulation(gradient.to_dense() if gradient.is_sparse else gradient))
                    p.grad = None
    finally:
        for name, p in parameters.items():
            p.grad = kept[name]
    # One example's gradients are not copied: preflight goes through examples one by one, for the memory.
    for name, values in rows.items():
        if values:
            factors[name] = [PerExample(values[0][None] if len(values) == 1 else torch.stack(values))]
    return PerExampleGradients(torch.cat(losses), factors, parameters)


class Truth(NamedTuple):
    """What a batch, whose first examples repeat, has by the loop: norms (B,), weighted sums, and those of tables.

    Sums are of examples whose norm is finite.
    """

    norms: Tensor
    sums: dict[str, Tensor]
    rows: dict[str, RowSum]

    @staticmethod
    def of(
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Batch,
        weights: Tensor,
        tables: Collection[str],
        numbers: Callable[[int], AbstractContextManager[object]],
    ) -> Truth:
        """With `weights` (B,). Of those that are alike the gradient is computed once, within `numbers(1)`."""
        norms, sums, parameters = [], None, trainable(model)
        rows = {name: RowSum(name, parameters[name]) for name in tables}
        for i in range(DIFFERENT):
            with numbers(1):
                one = loop(model, loss_fn, take(batch, [i]), tables=tables)
            sums = one.zeros(besides=tables) if sums is None else sums
            with full_precision(one.losses.device), beneath_modes():
                squares = [(parameters[name], squared_norms(uses)[0]) for name, uses in one.factors.items() if uses]
            norms.append(summed_over_shards(squares, one.losses.device).sqrt())
            weight = weights[i::DIFFERENT].sum(0, keepdim=True)
            one.add_weighted_sum_(sums, weight.where(norms[-1].isfinite(), 0), rows)
        return Truth(torch.cat(norms)[torch.arange(len(weights)) % DIFFERENT], sums or {}, rows)
