"""By how much an example's gradient is another beside others than alone, and in which rows; what tells sums of
them, and whether these are the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_dp.ranks as ranks
from hf_dp.per_example.checks.values import same
from hf_dp.per_example.record import PerExampleGradients
from hf_dp.per_example.rows import RowSum, Tables
from hf_dp.per_example.sharding import as_sums, summed_over_shards, trainable

# A gradient that is nothing beside the others' is held to a share of theirs: it is rounding.
_NEGLIGIBLE = 1e-2
# So many times what losses differ by themselves is no more than that.
_BY_ITSELF = 4.0


def moved_by(
    model: nn.Module,
    together: PerExampleGradients,
    i: int,
    alone: PerExampleGradients,
    tables: Collection[str],
    others: Tensor | None = None,
) -> float:
    """By how much of its norm the gradient of example i is another than that of the example alone, or its loss is.

    Args:
        others: the norms () or (B,) that one is held to a share of which is nothing beside them; those of `together`.
    """
    parameters = trainable(model)
    sums, rows = together.zeros(besides=tables), {name: RowSum(name, parameters[name]) for name in tables}
    losses = torch.stack([together.losses[i], alone.losses[0]]).double()
    norms = torch.stack([together.squared_norms()[i], alone.squared_norms()[0]]).double().sqrt()
    finite = norms.isfinite() & losses.isfinite()
    if not bool(finite.all()):
        # What is finite in neither contributes nothing, in a batch and alone.
        return float("inf") if bool(finite.any()) else 0.0
    chosen = torch.zeros_like(together.losses)
    chosen[i] = 1
    together.add_weighted_sum_(as_sums(sums, parameters), chosen, rows)
    alone.add_weighted_sum_(as_sums(sums, parameters), -torch.ones_like(alone.losses), rows)
    differences = {**sums, **{name: found.coalesced()[1] for name, found in rows.items()}}
    squares = []
    for name, values in differences.items():
        # All ranks gave the same examples.
        copies = ranks.world_size() if isinstance(parameters[name], DTensor) else 1
        norm = torch.linalg.vector_norm(values, dtype=torch.float64) / copies
        squares.append((parameters[name], norm.square()))
    difference = float(summed_over_shards(squares, losses.device).sqrt())
    others = together.squared_norms().sqrt() if others is None else others
    size = max(float(norms.max()), _NEGLIGIBLE * float(others.double().nan_to_num(0, 0, 0).max()))
    by_loss = float((losses[0] - losses[1]).abs() / losses.abs().max().clamp_min(1))
    return max(difference / size if size else difference, by_loss)


def has_other_rows(together: PerExampleGradients, i: int, alone: PerExampleGradients, tables: Collection[str]) -> bool:
    """Whether example i has a gradient in other rows of `tables` than the example alone. Where either has no finite
    gradient it counts in neither.

    How large they are does not matter: what is counted is that they are not zero.
    """
    finite = [bool(found.squared_norms()[at].isfinite()) for found, at in ((together, i), (alone, 0))]
    if not (tables and all(finite)):
        return False
    numbered = Tables.of({name: together.parameters[name] for name in tables})
    examples, rows = numbered.touched(together.factors)
    return not torch.equal(rows[examples == i], numbered.touched(alone.factors)[1])


@contextmanager
def still(model: nn.Module, tables: Collection[str]) -> Iterator[None]:
    """Inside, tables of these names have no gradient, which would be as large as they are."""
    trained = [p for name, p in model.named_parameters() if name in tables and p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def told_of_gradients(losses: Tensor, parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> Tensor:
    """What tells the gradients of those of `parameters` that are trained from others: a hook, or a backward pass of
    one's own, may read what no loss follows from. Neither these nor those of `others` are kept."""
    trained = [p for p in parameters if p.requires_grad]
    kept, told = [(p, p.grad) for p in (*trained, *others)], [losses.detach().double().new_zeros(())]
    if not losses.requires_grad:
        return torch.stack(told)
    try:
        for p, _ in kept:
            p.grad = None
        losses.sum().backward()
        for gradient in (p.grad for p in trained if p.grad is not None):
            values = (gradient.coalesce().values() if gradient.is_sparse else gradient).double()
            told += [values.norm().to(losses.device), values.sum().to(losses.device)]
        return torch.stack(told)
    finally:
        for p, before in kept:
            p.grad = before


def are_same(found: list[Tensor], rounding: float = 0.0) -> bool:
    """Whether a third number is no further from the first than a second one, of the same, for which it may be: sums of
    one batch differ by themselves, where a device adds up in any order."""
    one, again, other = found
    by_itself = _BY_ITSELF * (again - one).abs().max()
    return same(one, other) or bool((other - one).abs().max() <= by_itself.clamp_min(rounding))
