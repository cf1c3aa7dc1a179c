"""Two passes, where memory decides: one for the norms, one for the sum, and factors dropped once they are read.

Ghost clipping in its original form (Li et al. 2022, arXiv:2110.05679). The second pass makes the factors of the first
again, from the same random numbers, and adds them to the sums as one pass would; so ties, 16 bits and adapters are as
exact. That they are the same is held by sums over their bits. Kept until the first pass is over are those of a
parameter that is used several times, until all of its uses have come, and those of tables that are summed by rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

import hf_dp.ranks as ranks
from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.batch import Batch, LossFunction, batch_size
from hf_dp.per_example.factors import Factors
from hf_dp.per_example.grouped import Grouping
from hf_dp.per_example.norms import NormsOfDropped, magnitude_of_all
from hf_dp.per_example.padded import Inside
from hf_dp.per_example.pictures import check_pictures
from hf_dp.per_example.reading import Reader
from hf_dp.per_example.record import PerExampleGradients, checked_run
from hf_dp.per_example.rows import RowSum, restricted
from hf_dp.per_example.rule import Certificate, Rule, most_differing, refuse_changed, refuse_differing
from hf_dp.per_example.rules import RULES
from hf_dp.per_example.sharding import Shard, as_sums, is_sharded, trainable
from hf_dp.per_example.sums import NO_TABLES, adding
from hf_dp.per_example.taken import Take, TakenWatch
from hf_dp.randomness import state_to_return_to, unchanged_global_state


class TwoPasses(PerExampleGradients):
    """Per-example gradients of which only norms are kept, and the factors of tables; a weighted sum is a second pass.

    Args:
        watched: makes a watch for `take`; see `TakenWatch` for whether uses are joined, and come in order.
        run: runs it; the losses (B,).
        size: B.
        parameters: the trainable ones.
        device: of the losses.
        owners: for each row the number of its example, as for `grouped`.
        elsewhere: see `PerExampleGradients`. Rows of an example that has more elsewhere are summed as they are, in one
            pass: its norm is that of the sum.
    """

    def __init__(
        self,
        watched: Callable[[Take, bool, bool], TakenWatch],
        run: Callable[[TakenWatch], Tensor],
        size: int,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        owners: Sequence[int] | None = None,
        elsewhere: tuple[int, int] = (0, 0),
    ) -> None:
        self._watched, self._run, self._back = watched, run, state_to_return_to()
        super().__init__(torch.zeros(size, device=device), {}, parameters, elsewhere=elsewhere)
        self._is_piece = any(elsewhere)
        self._grouping = None if owners is None or self._is_piece else Grouping(owners)
        self._trained_rows: Mapping[str, Tensor] = {}
        self._bits = torch.zeros((), dtype=torch.int64)
        self._of_rows: dict[str, Tensor] = {}
        self._differed: Tensor | None = None
        self._order: list[str] = []
        if not self._is_piece:
            self._measure()

    def _measure(self) -> None:
        norms = NormsOfDropped()

        def take(name: str, uses: list[Factors]) -> None:
            self._order.append(name)
            norms.add(self._grouped(uses))

        watch = self._watched(take, True, False)
        losses = self._run(watch)
        with torch.no_grad():
            self._measured = norms.pairs()
        self.uses, self._bits = frozenset(watch.uses), watch.bits
        self.losses = losses if self._grouping is None else self._grouping.summed(losses)
        self._differed = self.differing = most_differing(watch.differing)
        refuse_changed(watch.versions)
        self.factors = {name: self._grouped(uses) for name, uses in watch.factors.items() if name in watch.tables}
        self._versions = watch.versions if self._grouping is None or self._grouping.is_view else ()

    def _grouped(self, uses: list[Factors]) -> list[Factors]:
        return uses if self._grouping is None else [self._grouping.of(use) for use in uses]

    def restricted(self, kept: Mapping[str, Tensor]) -> Self:
        """As of kept factors; a piece is restricted when it is summed."""
        found = super().restricted(kept)
        found._trained_rows = kept
        return found

    def grouped(self, owners: Sequence[int], before: int = 0, after: int = 0) -> PerExampleGradients:
        """Not of these: `record_in_two_passes` asks for owners before norms are taken."""
        raise ValueError("rows of which norms were taken are not grouped")

    def by_groups(self, groups: Sequence[Collection[str]], take: Callable[[int, PerExampleGradients], None]) -> None:
        """Of one group: norms are kept of all parameters together."""
        if len(groups) > 1:
            raise ValueError(f"{len(groups)} groups, in two passes")
        take(0, self)

    def add_weighted_sum_(
        self, out: Mapping[str, Tensor | Shard], coefficients: Tensor, rows: Mapping[str, RowSum] = NO_TABLES
    ) -> None:
        """As of kept factors, by one more pass with the random numbers of the first.

        `differing` then says of how many examples, of those that were added, the factors were others.
        """
        super().add_weighted_sum_(out, coefficients, rows)
        with adding(out, coefficients, self.whole_zeros, rows) as add:
            if self._is_piece:

                def add_piece(name: str, uses: list[Factors]) -> None:
                    own = self._restricted(name, uses)
                    add(name, own)
                    self._of_rows[name] = magnitude_of_all(own) + self._of_rows.get(name, 0)

                watch = self._watched(add_piece, False, False)
                self.losses, self.uses = self._run(watch), frozenset(watch.uses)
                self.differing = most_differing(watch.differing)
                return

            is_scattered = any(isinstance(one, Shard) for one in out.values())
            in_order = is_scattered and not _have_the_same(self._order)
            turns = iter([n for n in self.parameters if n not in self.factors] if in_order else self._order)

            def add_dropped(name: str, uses: list[Factors]) -> None:
                if is_scattered and next(turns, None) != name:
                    raise _in_another_order(name)
                if name not in self.factors:
                    add(name, self._grouped(uses))

            with unchanged_global_state():
                self._back()
                watch = self._watched(add_dropped, False, in_order)
                self._run(watch)
            if is_scattered and (missing := next(turns, None)) is not None:
                raise _in_another_order(missing)
        differing = watch.bits.ne(self._bits)
        if self._grouping is not None:
            differing = self._grouping.summed(differing.long()).ne(0)
        self.differing = most_differing([differing & coefficients.ne(0)], self._differed)

    def magnitudes(self) -> dict[str, Tensor]:
        """Of a piece, when it was summed."""
        return self._of_rows

    def _restricted(self, name: str, uses: list[Factors]) -> list[Factors]:
        return restricted(uses, self._trained_rows[name]) if name in self._trained_rows else uses


def _have_the_same(order: Sequence[str]) -> bool:
    """Whether gradients come by in one order on all ranks: they may have none of an expert that others have one of."""
    digest = hashlib.sha256("\n".join(order).encode()).digest()
    return len(ranks.gathered([int.from_bytes(digest[:6])]).unique()) == 1


def _in_another_order(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the gradient of {name} came at another time when it was computed again, in shards (FSDP2).",
        why="the ranks would add up gradients of different parameters.",
        fix="let the model compute the same when it is called again on the same batch, or leave passes at 1.",
    )


def refuse_two_passes(model: nn.Module, in_pieces: bool) -> None:
    """Refuses what two passes cannot do for this model.

    Args:
        model: as it will be trained.
        in_pieces: whether examples may have rows in several micro-batches.

    Raises:
        UnsupportedModelError: such in shards; a device on which the second pass may not be as the first.
    """
    if is_sharded(model) and in_pieces:
        raise UnsupportedModelError(
            "passes=2 with units under FSDP2.",
            why="rows of a unit with more in other micro-batches take one pass, and all ranks must take the same.",
            fix="train under DDP, let examples be the unit, or leave passes at 1.",
        )
    kinds = {p.device.type for p in model.parameters()} - {"cpu"}
    if kinds and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedModelError(
            f"passes=2 on {', '.join(sorted(kinds))} without deterministic algorithms.",
            why="the gradients of the second pass would differ from those whose norms were taken, and pass the bound.",
            fix="call torch.use_deterministic_algorithms(True), or set TrainingArguments(full_determinism=True).",
        )


def record_in_two_passes(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    certificate: Certificate,
    rules: Mapping[Any, Rule] = RULES,
    tables: Collection[str] = (),
    owners: tuple[Sequence[int], int, int] | None = None,
    inside: Inside = nullcontext,
) -> TwoPasses:
    """What `record` gives, with the memory of an ordinary step.

    Args:
        model: as for `record`, as are the others.
        loss_fn: called once in each pass.
        batch: is kept until the sum was made.
        certificate: from `preflight`.
        rules: the table of operations.
        tables: parameters whose factors, the looked-up rows, are kept.
        owners: whose each row is, and how many rows of a single example are in micro-batches before and after; as for
            `PerExampleGradients.grouped`.
        inside: what each pass is made inside of.

    Raises:
        UnsupportedModelError: as for `record`, and for `refuse_two_passes`.
    """
    refuse_two_passes(model, owners is not None and any(owners[1:]))
    size, parameters = batch_size(batch), trainable(model)
    check_pictures(model, batch)

    def watched(take: Take, joined: bool, in_order: bool) -> TakenWatch:
        reader = Reader(size, None, certificate.readings)
        # All ranks scatter the sum of each parameter once, in one order.
        is_once = joined or is_sharded(model)
        return TakenWatch(reader, rules, tables=frozenset(tables), take=take, joined=is_once, in_order=in_order)

    def run(watch: TakenWatch) -> Tensor:
        with inside():
            return checked_run(watch, model, loss_fn, batch, certificate)

    device = next(iter(parameters.values())).device
    if owners is None:
        return TwoPasses(watched, run, size, parameters, device)
    return TwoPasses(watched, run, size, parameters, device, owners[0], owners[1:])


def check_two_passes(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    certificate: Certificate,
    rules: Mapping[Any, Rule] = RULES,
    tables: Collection[str] = (),
) -> None:
    """Makes both passes over a batch, arguments as of `record_in_two_passes`, in the mode that the model is in.

    Raises:
        UnsupportedModelError: the second was another than the first.
    """
    with unchanged_global_state():
        found = record_in_two_passes(model, loss_fn, batch, certificate=certificate, rules=rules, tables=tables)
        rows = {name: RowSum(name, found.parameters[name]) for name in tables}
        sums = as_sums(found.zeros(besides=tables), found.parameters)
        found.add_weighted_sum_(sums, torch.ones_like(found.losses), rows)
        refuse_differing(found.differing)
