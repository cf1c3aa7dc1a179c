"""From rows to per-example gradients of one model: batches, loss and record, checked before the first step."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_dp.clipping.rule import ClippingRule, Group
from hf_dp.data.collate import Prepared
from hf_dp.data.extremes import extreme_rows
from hf_dp.data.failing_rows import failures_refused, refuse_rows_that_fail
from hf_dp.data.first_seen import check_order
from hf_dp.data.held_rows import hold, rare_rows
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.loader import PoissonDataLoader
from hf_dp.data.mixing_collator import check_collator
from hf_dp.data.mixing_dataset import check_dataset
from hf_dp.data.several_texts import warn_of_several
from hf_dp.data.stored_reads import warn_of_rows_of_others
from hf_dp.data.telling_rows import alike_batches, rows_beyond, short_rows, telling_rows, uneven_rows
from hf_dp.data.widths import Checked, outermost
from hf_dp.errors import HfDpError, UnseenUseError
from hf_dp.per_example import RULES, Certificate, PerExampleGradients, Rule, preflight, record
from hf_dp.per_example.batch import Batch, LossFunction, check_losses
from hf_dp.per_example.checks.beside import beside
from hf_dp.per_example.checks.coins import NotingDraws
from hf_dp.per_example.checks.installed import Installed, warn_of_change
from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.memory import unchanged_weights
from hf_dp.per_example.checks.outputs_apart import check_outputs_apart
from hf_dp.per_example.checks.padding import check_padding
from hf_dp.per_example.checks.quantised import check_quantised
from hf_dp.per_example.checks.reads import AsRead, Reads
from hf_dp.per_example.checks.state import unchanged_state, uncompiled
from hf_dp.per_example.checks.strangers import check_strangers
from hf_dp.per_example.checks.survey import survey
from hf_dp.per_example.checks.switches import Switches
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import check_two_passes, record_in_two_passes, refuse_two_passes
from hf_dp.per_example.sharding import all_names, is_sharded
from hf_dp.randomness import unchanged_global_state
from hf_dp.training.progress import passes_shown
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
        self.model, self._loss, self.loader, collate = model, loss, loader, loader.collate_fn
        self.prepare, self._padding, self._rules, self._check_losses = prepare, padding, rules, check_losses
        self._collator: Any = collate
        # A user's own preparation may mix rows, and draw numbers, as collators do.
        self._collate: Any = collate if own is None else Prepared(collate, own[1], own[0])  # type: ignore[arg-type]
        self._prepare_collated: Callable[[Any], Batch] = prepare if own is None else own[2]
        self.by_rows: Collection[str] = ()
        self.passes, self.is_silent = 1, False
        self.clipping: ClippingRule | None = None
        self._groups: Sequence[Group] = ()
        self._certificate: Certificate | None = None
        self._memory: Memory | None = None
        self._read: AsRead | None = None
        self._installed: Installed | None = None
        self._switches, self._moved, self._met, self._unread = Switches(), list[float](), list[Any](), set[str]()

    def record(self, micro_batch: MicroBatch) -> PerExampleGradients:
        """The gradients of one micro-batch, as they were certified; of units, of the means of their rows' losses.

        Those of rows of a unit that has more elsewhere are for `Pieces` to join.
        """
        batch, owners = micro_batch
        loss, certificate, rules = self._loss_of(owners), self._certificate, self._rules
        if self.passes == 2 and certificate is not None:
            return record_in_two_passes(
                self.model, loss, batch, certificate=certificate, rules=rules, tables=self.by_rows, owners=owners
            )
        found = record(self.model, loss, batch, certificate=certificate, rules=rules, tables=self.by_rows)
        return found if owners is None else found.grouped(*owners)

    def looks(self) -> tuple[Memory, Callable[[list[Any]], Tensor]]:
        """What sees, and puts back, what passes leave; and what gives the losses (B,) of rows, collated for checks."""
        memory = Memory(self.model, lambda few: self._loss(self.model, few), self._loss, self._switches, self.by_rows)
        return memory, lambda rows: self._loss(self.model, self._batch(rows))

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
        if self._installed is not None and not self._installed.is_of(self.model):
            self._check_again()
        for rows in item.get("unlike", []):
            self._met = outermost([*self._met, *rows], self._collator.widths)
            with uncompiled(), unchanged_global_state():
                known, together = self._padding.counts_columns, self._batch(rows)
                if self._padding.counts_columns == known:
                    self._check_padding(self._memory, self._certificate, rows, len(rows))
                else:  # The first that is padded on the left: from now on all batches have positions.
                    self._certify(self._memory, together, rows)
        batches = item["micro_batches"]
        owners = item.get("owners", []) if self.loader.draws_units else [None] * len(batches)
        if len(owners) != len(batches):
            raise HfDpError(
                f"a logical batch of {len(batches)} micro-batches, of which {len(owners)} say whose their rows are.",
                why="each unit is clipped as one.",
                fix="hand on the items of the loader as they are.",
            )
        self._switches.refuse_on_again()
        if self._read is not None and (changed := self._read.changed()) is not None:
            self._check_again(changed)
        # Nothing must be left of them.
        made = map(MicroBatch, map(self.prepare, batches), owners)
        yield from made if self._memory is None else self._memory.watched(made)
        if self._read is not None:
            self._read.note()

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
            few = self._batch(telling_rows(self.loader.dataset, self._collator.widths)[0])
            return survey(self.model, self._loss, few, rules=self._rules)

    def check(self) -> None:
        """Holds model, collator and data against what each example does by itself; it spends nothing.

        Raises:
            UnsupportedModelError: per-example gradients of this model are not known to be exact.
            ConfigurationError: a collator, rows, a loss or groups that a private run cannot use.
        """
        self._groups = () if self.clipping is None else self.clipping.groups(all_names(self.model))
        if self.passes == 2:
            refuse_two_passes(self.model, self.loader.draws_units)
        shown = passes_shown(self.model, is_silent=self.is_silent)
        with shown, unchanged_weights(self.model), failures_refused(), self._collator.measuring_once():
            reads = self._check()
        # Ranks that share weights would have to look again at the same time. What passes write to is known by now.
        self._installed = None if is_sharded(self.model) else Installed(self.model)
        self._read = None if reads is None else AsRead(self.model, reads)

    def _check_again(self, changed: str | None = None) -> None:
        warn_of_change(changed)
        memory = self._memory
        try:
            self.check()
        except BaseException:
            self._memory = memory  # a loop that goes on without what was refused is asked what it was asked
            raise

    def _check(self) -> Reads | None:
        dataset: Any = self.loader.dataset
        of_short, of_whole = (NotingDraws(self.model, self._loss) for _ in range(2))
        self.model.train()
        check_quantised(beside(self.model, self._loss))
        self._memory, self._moved, (memory, _) = None, [], self.looks()
        with memory.restored(), uncompiled(), unchanged_global_state():
            check_order(dataset.dataset, self._collate)  # before a row is read
            warn_of_rows_of_others(dataset.dataset, None if self.loader.draws_units else self._collate.collated)
            few, others = telling_rows(dataset, self._collator.widths)
            memory.settle(self._batch([row]) for row in few)
            with memory.unchanged():
                one, other, together = alike_batches(few, self._batch)
                extremes = extreme_rows(dataset.dataset)
                warn_of_several(together, are_even=not extremes.uneven)
                # Where columns tell of ids, labels and lengths, what is no narrower and no wider shows no more.
                tried = rows_beyond(few, extreme := [dataset[i] for i in extremes.rows], self._collator.widths)
                refuse_rows_that_fail(dataset, extremes.rows, tried, memory.apart(lambda r: of_whole(self._batch([r]))))
                check_dataset(dataset.dataset)
                with self._padding.put_aside():
                    check_collator(self._collate, few, [*extreme, *(rare := rare_rows(dataset))])
                self._unread = memory.refuse(one, other, together)
                uneven = [*uneven_rows(dataset, extremes, few), *self._met]
                memory.rows = lambda: (self._batch([row]) for row in (*few, *tried, *uneven, *rare))
                # Padding first: what it shows is how all batches are completed, those of one length as well.
                self._batch(outermost(uneven, self._collator.widths))
            # Whatever short rows switch must not stay so, nor be certified.
            short = self._batch(short_rows(few, self._batch, memory.unchanged()(of_short)))
            if of_whole.drawn - of_short.drawn:  # Longer rows are moved by numbers that short ones do not draw.
                short = self._batch([*few, outermost(uneven, self._collator.widths)[-1]])
            try:
                ends = self._certify(memory, short, uneven, others, rare)
            except UnseenUseError:
                ends = self._certify(memory, self._batch(few), uneven, others, rare)
            if self._check_losses is not None:
                self._check_losses(self.model, short, (self._batch([row]) for row in few))
        memory.ask_of(short)
        self._memory, reads = memory, None if is_sharded(self.model) else memory.read_by(short)
        # Ranks that share weights would have to look at a wider row at the same time.
        uneven = outermost(uneven, self._collator.widths, ends)
        self._collator.check_cut(uneven, self._moved)
        self._collator.checked = None if is_sharded(self.model) else Checked(uneven, self._collator.widths, ends)
        return reads

    def _certify(self, memory: Any, together: Batch, uneven: list[Any], others: Any = (), rare: Any = ()) -> list[Any]:
        """Of `uneven`, the ends that add something. `others` may be held against these as well; `rare` rows are."""
        known: dict[str, Any] = {"rules": self._rules, "tables": self.by_rows}
        self._certificate = certificate = preflight(self.model, self._loss, together, **known, switches=self._switches)
        known["certificate"] = certificate
        with memory.restored(), memory.unchanged():  # a mean that is kept would be NaN from now on
            check_strangers(self.model, self._loss, together, **known)
            check_outputs_apart(self.model, self._loss, together, **known, is_known=self._check_losses is not None)
            if self.passes == 2:
                check_two_passes(self.model, self._loss, together, **known)
        compare = functools.partial(self._check_padding, memory, certificate)
        ends = hold(uneven, others, self._collator.widths, compare, rare)
        if len(self._groups) > 1 and isinstance(found := self.to_sum(MicroBatch(together)), InGroups):
            # What is refused of a backward pass in which groups are handed on.
            with unchanged_global_state(), memory.unchanged():
                found.by_groups([group.names for group in self._groups], lambda number, group: None)
        return ends

    def _check_padding(self, memory: Any, certificate: Certificate | None, rows: list[Any], number: int) -> list[float]:
        """The norms of their gradients."""
        with memory.unchanged():
            return check_padding(
                self.model, self._loss, rows, self._collate.collated, self._prepare_collated, certificate=certificate,
                rules=self._rules, number=number, tables=self.by_rows, note=self._moved.append, unread=self._unread,
            )  # fmt: skip

    def _batch(self, rows: list[Any]) -> Batch:
        return self._prepare_collated(self._collate.collated(copy.deepcopy(rows)))
