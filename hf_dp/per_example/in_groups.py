"""Groups of parameters that are clipped each by itself: summed as the backward pass goes, and kept no longer.

Of one group norms and sums are made of the same factors, as of all parameters in `record`; when all uses of its
parameters have come they are handed on, and dropped (He et al. 2023, arXiv:2212.01539). What is kept beside the memory
of an ordinary step are the factors of one group, and those of groups whose parameters are used far apart (a tied
embedding, say, from the first to the last).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from hf_dp.per_example.batch import Batch, LossFunction, batch_size
from hf_dp.per_example.factors import Factors
from hf_dp.per_example.padded import Inside
from hf_dp.per_example.pictures import check_pictures
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.record import PerExampleGradients, checked_run
from hf_dp.per_example.rows import RowSum
from hf_dp.per_example.rule import Certificate, Rule, most_differing
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import Shard, trainable
from hf_dp.per_example.sums import NO_TABLES
from hf_dp.per_example.taken import GroupWatch


class InGroups(PerExampleGradients):
    """Per-example gradients that are made when they are summed, group by group; afterwards only tables have factors.

    Args:
        model: as for `record`, as are the next two.
        loss_fn: called once.
        batch: is kept until the sum was made.
        certificate: from `preflight`.
        rules: the table of operations.
        tables: parameters whose factors, the looked-up rows, are kept.
        owners: for each row the number of its example, as for `grouped`; None where each is one.
        inside: what the passes are made inside of.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Batch,
        *,
        certificate: Certificate,
        rules: Mapping[Any, Rule] = RULES,
        tables: Collection[str] = (),
        owners: Sequence[int] | None = None,
        inside: Inside = nullcontext,
    ) -> None:
        parameters = trainable(model)
        rows, device = batch_size(batch), next(iter(parameters.values())).device
        super().__init__(torch.zeros(rows if owners is None else len(set(owners)), device=device), {}, parameters)
        self._of, self._rows, self._owners = (model, loss_fn, batch), rows, owners
        self._certificate, self._rules, self._tables = certificate, rules, frozenset(tables)
        self._trained_rows: Mapping[str, Tensor] = {}
        self._inside = inside

    def by_groups(self, groups: Sequence[Collection[str]], take: Callable[[int, PerExampleGradients], None]) -> None:
        """One forward and one backward pass, errors as of `record`: after them a sum is not to be used."""

        def take_group(number: int, losses: Tensor, factors: dict[str, list[Factors]]) -> None:
            own = PerExampleGradients(losses, factors, self.parameters)
            own = own if self._owners is None else own.grouped(self._owners)
            own = own.restricted({name: rows for name, rows in self._trained_rows.items() if name in own.factors})
            self.losses = own.losses
            self.factors |= {name: uses for name, uses in own.factors.items() if name in self._tables}
            take(number, own)

        reader = Reader(self._rows, None, self._certificate.readings)
        watch = GroupWatch(reader, self._rules, tables=self._tables, groups=groups, take_group=take_group)
        check_pictures(self._of[0], self._of[2])
        with self._inside():
            checked_run(watch, *self._of, self._certificate)
        self.uses, self.differing = frozenset(watch.uses), most_differing(watch.differing)

    def restricted(self, kept: Mapping[str, Tensor]) -> Self:
        """As of kept factors."""
        found = copy.copy(self)
        found._trained_rows = kept
        return found

    def grouped(self, owners: Sequence[int], before: int = 0, after: int = 0) -> PerExampleGradients:
        """Not of these: they are given their owners."""
        raise ValueError("rows that are not recorded yet are not grouped")

    def add_weighted_sum_(
        self, out: Mapping[str, Tensor | Shard], coefficients: Tensor, rows: Mapping[str, RowSum] = NO_TABLES
    ) -> None:
        """Not of these: each group has coefficients of its own."""
        raise ValueError("gradients that are summed by groups have no sum with one coefficient for each example")

    def _norms_and_rounding(self) -> tuple[Tensor, Tensor]:
        raise ValueError("gradients that are summed by groups have no norms before")
