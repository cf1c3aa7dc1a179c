"""record(model, loss_fn, batch): one forward, one backward, and the per-example gradients of all parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_dp.errors import UnseenUseError, UnsupportedModelError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size
from hf_dp.per_example.checks.independence import check_independence, check_shares
from hf_dp.per_example.checks.survey import ambiguous_sizes, survey
from hf_dp.per_example.factors import Factors
from hf_dp.per_example.grouped import Grouping
from hf_dp.per_example.ieee import beneath_modes, full_precision
from hf_dp.per_example.norms import all_squared_norms, magnitude_of_all, stacked
from hf_dp.per_example.pictures import check_pictures
from hf_dp.per_example.precision import sum_dtype
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.rows import RowSum, restricted
from hf_dp.per_example.rule import Certificate, Rule, Use, most_differing, refuse_changed
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import Shard, as_sums, is_sharded, local
from hf_dp.per_example.sums import NO_TABLES, adding
from hf_dp.per_example.watch import Watch


class PerExampleGradients:
    """The gradients of each example's own loss, held as factors.

    Attributes:
        losses: (B,) detached.
        factors: for each trainable parameter (tied names collapse to the first) the factors of its uses.
        parameters: the trainable ones.
        uses: which operations used which parameters.
        differing: how many examples came out otherwise when they were computed again, (), on the device; who releases a
            sum asks `refuse_differing` before.
        elsewhere: where all rows are of one example, how many more it has in micro-batches before and after this one.
    """

    def __init__(
        self,
        losses: Tensor,
        factors: dict[str, list[Factors]],
        parameters: dict[str, nn.Parameter],
        uses: frozenset[Use] = frozenset(),
        versions: Sequence[tuple[Tensor, int]] = (),
        elsewhere: tuple[int, int] = (0, 0),
    ) -> None:
        self._versions = versions
        self.losses, self.factors, self.uses = losses, factors, uses
        self.parameters, self.elsewhere = parameters, elsewhere
        self.differing: Tensor | None = None
        self._norms: tuple[Tensor, Tensor] | None = None
        # Squared norms and bounds on their rounding, of parameters whose factors are not kept.
        self._measured: list[tuple[Tensor, Tensor]] = []

    @property
    def batch_size(self) -> int:
        return int(self.losses.shape[0])

    def squared_norms(self) -> Tensor:
        """(B,): the squared l2 norm of each example's gradient over all trainable parameters."""
        return self._norms_and_rounding()[0]

    def rounding(self) -> Tensor:
        """(B,): a bound on the floating-point error of `squared_norms`, for the clipping bound to hold all the same."""
        return self._norms_and_rounding()[1]

    def weighted_sum(self, coefficients: Tensor) -> dict[str, Tensor]:
        """sum over i of coefficients[i] x (gradient of example i), for each parameter in its shape.

        Args:
            coefficients: (B,). An example with coefficient 0 is left out by selection, so that 0 x NaN is 0.

        Returns:
            float32 (float64 for float64 parameters) gradients, zero for a parameter that was not used. Of a parameter
            that FSDP2 shards it is this rank's part of the sum over all ranks, which must call it together.
        """
        out = self.zeros()
        self.add_weighted_sum_(as_sums(out, self.parameters), coefficients)
        return out

    def zeros(self, besides: Collection[str] = ()) -> dict[str, Tensor]:
        """A zero gradient for each parameter but those `besides`, this rank's part if it is sharded, in the dtype of
        sums."""
        return {
            name: torch.zeros_like(local(p), dtype=sum_dtype(p.dtype), requires_grad=False)
            for name, p in self.parameters.items()
            if name not in besides
        }

    def restricted(self, kept: Mapping[str, Tensor]) -> Self:
        """The gradients with all but some rows of tables frozen.

        Args:
            kept: for each table the mask (V,) of the rows that are trained.

        Raises:
            UnsupportedModelError: a table that is used for more than looking up rows.
        """
        return self._with({n: restricted(uses, kept[n]) if n in kept else uses for n, uses in self.factors.items()})

    def by_groups(self, groups: Sequence[Collection[str]], take: Callable[[int, PerExampleGradients], None]) -> None:
        """Hands each group of parameters, by its number, to `take`, which sums it: all of them, each in one group."""
        if len(groups) == 1:
            take(0, self)
            return
        for number, names in enumerate(groups):
            take(number, self._with({name: uses for name, uses in self.factors.items() if name in names}))

    def _with(self, factors: dict[str, list[Factors]]) -> Self:
        """The same with other factors."""
        found = copy.copy(self)
        found.factors, found._norms = factors, None
        return found

    def none(self) -> PerExampleGradients:
        """Those of no example, of the same parameters."""
        return PerExampleGradients(self.losses[:0], {name: [] for name in self.parameters}, self.parameters, self.uses)

    @torch.no_grad()
    def grouped(self, owners: Sequence[int], before: int = 0, after: int = 0) -> PerExampleGradients:
        """The gradients of examples that are several rows each: the sums over their rows.

        The factors are taken away from here, so that they are not in memory twice.

        Args:
            owners: for each row the number of its example, from 0 to U - 1; each has a row.
            before: of a single example, how many rows are in micro-batches before. With these, or some `after`, its
                rows stay as they are: `Pieces` sums them.
            after: in micro-batches after this one.
        """
        if len(owners) != self.batch_size or ((before or after) and any(owners)):
            raise ValueError(f"owners of {len(owners)} rows for {self.batch_size}, {before} before, {after} after")
        if before or after:
            piece = self._with(self.factors)
            piece.elsewhere = before, after
            return piece
        refuse_changed(self._versions)
        grouping = Grouping(owners, [use for uses in self.factors.values() for use in uses])
        versions, factors = self._versions if grouping.is_view else (), {}
        self._versions = ()
        for name in list(self.factors):
            factors[name] = [grouping.of(use) for use in self.factors.pop(name)]
        joined = self._with(factors)
        joined.losses, joined._versions = grouping.summed(self.losses), versions
        return joined

    def add_weighted_sum_(
        self, out: Mapping[str, Tensor | Shard], coefficients: Tensor, rows: Mapping[str, RowSum] = NO_TABLES
    ) -> None:
        """Adds `weighted_sum(coefficients)` in place: to `rows` for the tables there, to `out` for the rest.

        To a `Shard` it adds that of all ranks, which call it together.
        """
        if coefficients.shape != self.losses.shape:
            raise ValueError(f"coefficients {tuple(coefficients.shape)} for losses {tuple(self.losses.shape)}")
        summing = adding(out, coefficients, self.whole_zeros, rows)
        with torch.no_grad(), full_precision(self.losses.device), beneath_modes(), summing as add:
            refuse_changed(self._versions)
            for name, uses in self.factors.items():
                add(name, uses)

    @torch.no_grad()
    def magnitudes(self) -> dict[str, Tensor]:
        """For each parameter that is used (B,): what the norm of its gradient could be if nothing cancelled."""
        return {name: magnitude_of_all(uses) for name, uses in self.factors.items() if uses}

    def whole_zeros(self, name: str) -> Tensor:
        """A zero gradient of all of one parameter, contiguous, in the dtype of sums, where it is computed."""
        p = self.parameters[name]
        device = self.losses.device if isinstance(p, DTensor) else p.device
        return torch.zeros(p.shape, dtype=sum_dtype(p.dtype), device=device)

    @torch.no_grad()
    def _norms_and_rounding(self) -> tuple[Tensor, Tensor]:
        if self._norms is None:
            with full_precision(self.losses.device), beneath_modes():
                refuse_changed(self._versions)
                pairs = all_squared_norms(self.factors.values())
            pairs += self._measured
            self._norms = stacked(pairs, self.losses)
        return self._norms


def record(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    certificate: Certificate | None = None,
    rules: Mapping[Any, Rule] = RULES,
    tables: Collection[str] = (),
) -> PerExampleGradients:
    """Per-example gradients of all trainable parameters; with a certificate, in one forward and one backward pass.

    Args:
        model: any module; its parameters are put back as they were, and no `.grad` is touched.
        loss_fn: `loss_fn(model, batch) -> (B,)`, one loss for each example, depending on that example alone.
        batch: a mapping whose tensors have one row for each of the B examples.
        certificate: from `preflight`. Without one there are two more forward passes, which show how shapes are to be
            read, and a shape that could be read two ways is settled by more of them, or refused.
        rules: the table of operations.
        tables: parameters whose factors keep the ids of the rows that were looked up.

    Raises:
        UnsupportedModelError: an operation without a rule, an unreadable shape, a use that the certificate lacks.
        ConfigurationError: a batch or a loss without one row for each example.
    """
    size = batch_size(batch)
    check_pictures(model, batch)
    seen, ambiguous = certificate, None
    if seen is None:
        ambiguous = ambiguous_sizes(model, batch)
        seen = survey(model, loss_fn, batch, rules=rules) if size > 1 else Certificate()
    watch = Watch(Reader(size, ambiguous, seen.readings), rules, tables=frozenset(tables))
    losses = checked_run(watch, model, loss_fn, batch, certificate, seen)
    found = PerExampleGradients(losses, watch.factors, watch.parameters, frozenset(watch.uses), watch.versions)
    found.differing = most_differing(watch.differing)
    return found


def checked_run(
    watch: Watch,
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    certificate: Certificate | None,
    seen: Certificate | None = None,
) -> Tensor:
    """Runs a `watch`, and refuses what it saw where that is not known to be exact; errors as of `record`.

    Args:
        watch: of a recording that has not begun.
        model: see `record`, as for `loss_fn` and `batch`.
        certificate: what must cover all uses, if there is one.
        seen: whose readings the watch has, where that is another.

    Returns:
        The losses (B,).
    """
    rules, size = watch.rules, watch.batch_size
    seen = next((known for known in (seen, certificate) if known is not None), Certificate())
    losses = watch.run(model, loss_fn, batch)
    if not watch.found_any:
        raise UnsupportedModelError(
            "no trainable parameter received a gradient from the loss.",
            why="there is nothing to train, and epsilon would be spent for nothing.",
            fix="unfreeze some parameters, or check that the loss depends on the model's output.",
        )
    if watch.doubts:
        check_independence(model, loss_fn, batch, rules=rules, readings=seen.readings)
    if watch.reader.counts.are_uneven_images and is_sharded(model):
        raise UnsupportedModelError(
            f"examples with {watch.reader.counts.images} images, under FSDP2.",
            why="whose each is takes further passes to find out, which all ranks would have to make together.",
            fix="give all examples of a micro-batch as many images, or train under DDP.",
        )
    # As many images as examples need not be one image of each.
    if watch.doubts or watch.reader.counts.are_uneven_images:
        check_shares(model, loss_fn, batch, rules=rules, readings=seen.readings)
    if certificate is not None and size > 1 and not certificate.covers(watch.uses):
        unseen = sorted(watch.uses - certificate)[0]
        raise UnseenUseError(
            f"{unseen.parameter} is used by {unseen.operation} ({unseen.reading}, {unseen.dimensions} dimensions), "
            "which preflight did not see.",
            why="a use that was never compared with the oracle is not known to be exact.",
            fix="make the model take the same path for every batch, or run preflight on a batch like this one. What is "
            "unfrozen, or an adapter that is switched to, after the first step is for a training of its own: end this "
            "one with save_model(), and begin another with PrivacyConfig(after=...), which has one budget with it.",
        )
    return losses
