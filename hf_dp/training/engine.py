"""From rows to per-example gradients of one model: batches, loss and record, of what was checked."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dp.clipping.rule import ClippingRule, Group
from hf_dp.data.failing_rows import failures_refused
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.loader import PoissonDataLoader
from hf_dp.data.telling_rows import telling_rows
from hf_dp.errors import HfDpError
from hf_dp.per_example import RULES, Certificate, PerExampleGradients, Rule, record
from hf_dp.per_example.batch import Batch, LossFunction, check_losses
from hf_dp.per_example.checks.installed import warn_of_change
from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.memory import unchanged_weights
from hf_dp.per_example.checks.state import unchanged_state
from hf_dp.per_example.checks.survey import survey
from hf_dp.per_example.checks.switches import Switches
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.padded import Inside, each_row_by_itself, reads_rows_together
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.per_example.sharding import all_names, is_sharded
from hf_dp.randomness import unchanged_global_state
from hf_dp.training.checks import Checks, Rows, Subject
from hf_dp.units.packing import Owners


class MicroBatch(NamedTuple):
    """What is recorded at once.

    Attributes:
        batch: for the model.
        owners: whose each row is, where units are no single rows. The model does not see it.
    """

    batch: Batch
    owners: Owners | None = None


class Engine:
    """The per-example gradients of one model on one loader's data.

    Args:
        model: unwrapped.
        loss: `loss(model, batch) -> (B,)`, each example's own.
        loader: of the training data.
        prepare: a collated batch on its way to the model: moved, and completed by `padding`.
        padding: what `prepare` has learnt of batches that are padded on the left.
        rules: how operations use their parameters.
        check_losses: holds `loss` of a few examples against what it is meant to be; None where nobody else knows that.
        own: of `prepare`, the name of a method of the user's, that method, and what is done after it.

    Attributes:
        model: as above; a later wrapper may give another.
        by_rows: the names of the parameters whose gradients are summed by rows.
        passes: of a step, see `PrivacyConfig`.
        is_silent: whether its progress is shown nowhere.
        clipping: the rule of a step; None where there is none yet.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        loader: PoissonDataLoader,
        prepare: Callable[[Any], Any],
        padding: LeftPadding,
        rules: Mapping[Any, Rule] = RULES,
        check_losses: Callable[[nn.Module, Batch, Iterable[Batch]], None] | None = None,
        own: tuple[str, Callable[[Any], Any], Callable[[Any], Any]] | None = None,
    ) -> None:
        self.model, self._loss, self.loader, self.prepare = model, loss, loader, prepare
        self._rules, self._check_losses, self._rows = rules, check_losses, Rows(loader, prepare, padding, own)
        self.by_rows: Collection[str] = ()
        self.passes, self.is_silent = 1, False
        self.clipping: ClippingRule | None = None
        self._groups: Sequence[Group] = ()
        self._checks: Checks | None = None
        self._switches = Switches()

    @property
    def collate(self) -> Any:
        """The user's function that makes batches of rows."""
        return self._rows.collator.given

    @property
    def _certificate(self) -> Certificate | None:
        return None if self._checks is None else self._checks.certificate

    def record(self, micro_batch: MicroBatch) -> PerExampleGradients:
        """The gradients of one micro-batch, as they were certified; of units, of the means of their rows' losses.

        Those of rows of a unit that has more elsewhere are for `Pieces` to join.
        """
        found = self._recorded(micro_batch)
        # In shards all ranks would have to do so.
        if is_sharded(self.model) or not reads_rows_together(found.losses.device) or not _may_have_spread(found):
            return found
        # Not twice in memory.
        del found
        return self._recorded(micro_batch, each_row_by_itself)

    def _recorded(self, micro_batch: MicroBatch, inside: Inside = nullcontext) -> PerExampleGradients:
        batch, owners = micro_batch
        loss, certificate, rules = self._loss_of(owners), self._certificate, self._rules
        if self.passes == 2 and certificate is not None:
            return record_in_two_passes(
                self.model, loss, batch, certificate=certificate, rules=rules, tables=self.by_rows, owners=owners,
                inside=inside,
            )  # fmt: skip
        with inside():
            found = record(self.model, loss, batch, certificate=certificate, rules=rules, tables=self.by_rows)
        return found if owners is None else found.grouped(*owners)

    def to_sum(self, micro_batch: MicroBatch) -> PerExampleGradients:
        """The same, for a sum alone: what is clipped by groups is made when it is summed.

        In shards factors are kept: all ranks scatter the sums in one order. Rows of a unit that has more elsewhere are
        summed before they are clipped.
        """
        batch, owners = micro_batch
        in_pieces = owners is not None and (owners.before > 0 or owners.after > 0)
        if len(self._groups) < 2 or self._certificate is None or in_pieces or is_sharded(self.model):
            return self.record(micro_batch)
        return InGroups(
            self.model, self._loss_of(owners), batch, certificate=self._certificate, rules=self._rules,
            tables=self.by_rows, owners=None if owners is None else owners.units,
            # Sums are made before anything tells that they lack something.
            inside=each_row_by_itself if reads_rows_together(next(self.model.parameters()).device) else nullcontext,
        )  # fmt: skip

    def _loss_of(self, owners: Owners | None) -> LossFunction:
        return self._loss if owners is None else functools.partial(self._share_of_mean, owners)

    def _share_of_mean(self, owners: Owners, model: Any, batch: Batch) -> Tensor:
        losses, rows = self._loss(model, batch), Counter(owners.units)
        check_losses(losses, len(owners.units))
        elsewhere = owners.before + owners.after
        shares = torch.tensor([1 / (rows[unit] + elsewhere) for unit in owners.units], dtype=losses.dtype)
        return losses * shares.to(losses.device, non_blocking=True)

    def micro_batches(self, item: Mapping[str, Any]) -> Generator[MicroBatch]:
        """Of one logical batch, once what is new since the check, rows, modules or values, is known to do no harm."""
        if self._checks is not None and not self._checks.knows(self.model):
            self._check_again()
        if self._checks is not None:
            for rows in item.get("unlike", []):
                self._checks.hold(rows)
        batches = item["micro_batches"]
        owners = item.get("owners", []) if self.loader.draws_units else [None] * len(batches)
        if len(owners) != len(batches):
            raise HfDpError(
                f"a logical batch of {len(batches)} micro-batches, of which {len(owners)} say whose their rows are.",
                why="each unit is clipped as one.",
                fix="hand on the items of the loader as they are.",
            )
        self._switches.refuse_on_again()
        if self._checks is not None and (changed := self._checks.changed()) is not None:
            self._check_again(changed)
        made = map(MicroBatch, map(self.prepare, batches), owners)
        if self._checks is None:
            yield from made
        else:  # Nothing must be left of them.
            yield from self._checks.memory.watched(made)
            self._checks.note()

    def dummies(self, item: Mapping[str, Any]) -> Iterator[MicroBatch]:
        """Of one logical batch, so that all ranks compute as many micro-batches. All call it together."""
        return map(MicroBatch, map(self.prepare, self.loader.dummies(item)))

    def examples(self, indices: Sequence[int], at_once: int) -> Iterator[MicroBatch]:
        """These training examples, or units, in micro-batches; read so many at a time."""
        dataset: Any = self.loader.dataset
        for start in range(0, len(indices), at_once):
            few = list(self.loader.examples(indices[start : start + at_once]))
            yield from self.micro_batches(self.loader.collate_fn(dataset.__getitems__(few)))

    def uses(self) -> Certificate:
        """Which operations use which parameters, for a few rows."""
        self.model.train()
        with unchanged_weights(self.model), unchanged_global_state(), unchanged_state(self.model), failures_refused():
            few = self._rows.batch(telling_rows(self._rows.dataset, self._rows.widths)[0])
            return survey(self.model, self._loss, few, rules=self._rules)

    def looks(self) -> tuple[Memory, Callable[[list[Any]], Tensor]]:
        """What sees, and puts back, what passes leave; and what gives the losses (B,) of rows, collated for checks."""
        return self._subject().memory(), lambda rows: self._loss(self.model, self._rows.batch(rows))

    def check(self) -> None:
        """Holds model, collator and data against what each example does by itself: see `Checks`."""
        self._groups = () if self.clipping is None else self.clipping.groups(all_names(self.model))
        self._checks = Checks(self._subject(), self._rows, is_silent=self.is_silent)

    def _check_again(self, changed: str | None = None) -> None:
        # Where it is refused, a loop that goes on without what was refused is asked what it was asked.
        warn_of_change(changed)
        self.check()

    def _subject(self) -> Subject:
        return Subject(
            *(self.model, self._loss, self._rules, self.by_rows, self.passes, self._groups),
            *(self._check_losses, self._switches),
        )


def _may_have_spread(gradients: PerExampleGradients) -> bool:
    """Whether some of several examples is not finite; rows of a single one that has more elsewhere have no others."""
    if gradients.batch_size < 2 or any(gradients.elsewhere):
        return False
    return not bool((gradients.losses.isfinite() & gradients.squared_norms().isfinite()).all())
