"""Weighted sums over examples, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from torch import Tensor

from hf_dp.per_example.chosen import Chosen, Together
from hf_dp.per_example.factors import Factors, OfChosen
from hf_dp.per_example.rows import RowSum
from hf_dp.per_example.rule import refuse_changed
from hf_dp.per_example.sharding import Shard
from hf_dp.per_example.waiting import answers_at_once

NO_TABLES: Mapping[str, RowSum] = MappingProxyType({})


@contextmanager
def adding(
    out: Mapping[str, Tensor | Shard],
    coefficients: Tensor,
    whole_zeros: Callable[[str], Tensor],
    rows: Mapping[str, RowSum] = NO_TABLES,
) -> Iterator[Callable[[str, list[Factors]], None]]:
    """What adds the weighted sum over the uses of one parameter, by its name: it is there when the context ends.

    Args:
        out: what is added to, of all parameters but tables.
        coefficients: (B,).
        whole_zeros: gives zeros for the gradient of one parameter, contiguous.
        rows: what is added to of tables.
    """
    chosen, weights, together = _chosen(coefficients)

    def add(name: str, uses: list[Factors]) -> None:
        if name in rows:
            for use in chosen(uses):
                rows[name].add_(use, weights)
            return
        kept = out[name]
        # A parameter may be laid out otherwise (channels_last); factors are summed row by row.
        if not isinstance(kept, Tensor) or not kept.is_contiguous():
            total = whole_zeros(name)
            for use in chosen(uses):
                use.add_weighted_(total, weights)
            kept.add_(total)
            return
        for use in chosen(uses):
            if isinstance(use, OfChosen) and together.takes(values := use.in_rows(kept.dtype)):
                together.add_(kept.view(-1), values)
            else:
                use.add_weighted_(kept, weights)

    yield add
    together.finish()


def _chosen(coefficients: Tensor) -> tuple[Callable[[list[Factors]], Iterable[Factors]], Tensor, Together]:
    """What leaves out the examples with coefficient 0, the coefficients of the others, and sums of small gradients."""
    chosen = Chosen(coefficients)
    together = Together(chosen, refuse_changed)
    if not answers_at_once(coefficients.device):
        return lambda uses: (use.masked(chosen) for use in uses), coefficients, together
    if bool(chosen.mask.all()):
        return lambda uses: uses, coefficients, together
    index = chosen.mask.nonzero().squeeze(1)
    return lambda uses: (use.selected(index) for use in uses if len(index)), coefficients[index], together
