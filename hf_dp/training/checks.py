"""What is asked of a model, its losses and its data before the first step, and of what comes later that is new."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from hf_dp.clipping.rule import Group
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
from hf_dp.data.widths import Checked, Measure, outermost
from hf_dp.errors import UnseenUseError
from hf_dp.per_example import Certificate, Rule, preflight
from hf_dp.per_example.batch import Batch, LossFunction
from hf_dp.per_example.checks.beside import beside
from hf_dp.per_example.checks.coins import NotingDraws
from hf_dp.per_example.checks.installed import Installed
from hf_dp.per_example.checks.kept import Memory
from hf_dp.per_example.checks.memory import unchanged_weights
from hf_dp.per_example.checks.outputs_apart import check_outputs_apart
from hf_dp.per_example.checks.padding import check_padding
from hf_dp.per_example.checks.quantised import check_quantised
from hf_dp.per_example.checks.reads import AsRead, Reads
from hf_dp.per_example.checks.state import uncompiled
from hf_dp.per_example.checks.strangers import check_strangers
from hf_dp.per_example.checks.switches import Switches
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import check_two_passes, refuse_two_passes
from hf_dp.per_example.sharding import is_sharded
from hf_dp.randomness import unchanged_global_state
from hf_dp.training.progress import passes_shown


class Rows:
    """The training data, and how checks make batches of it.

    Args:
        loader: of the training data.
        prepare: a collated batch on its way to the model: moved, and completed by `padding`.
        padding: what `prepare` has learnt of batches that are padded on the left.
        own: of `prepare`, the name of a method of the user's, that method, and what is done after it.

    Attributes:
        loader, padding: as above.
        collate: what makes of rows a batch that is not prepared.
        met: rows that are wider or narrower than all that had been checked when they were drawn.
    """

    def __init__(
        self,
        loader: PoissonDataLoader,
        prepare: Callable[[Any], Any],
        padding: LeftPadding,
        own: tuple[str, Callable[[Any], Any], Callable[[Any], Any]] | None,
    ) -> None:
        self.loader, self.padding, self.met = loader, padding, list[Any]()
        self.collator = collator = cast(Any, loader.collate_fn)
        # A user's own preparation may mix rows, and draw numbers, as collators do.
        self.collate = collator if own is None else Prepared(collator, own[1], own[0])
        self.prepare: Callable[[Batch], Batch] = prepare if own is None else own[2]

    @property
    def dataset(self) -> Any:
        """Each row by its number, as steps read it."""
        return self.loader.dataset

    @property
    def widths(self) -> Measure:
        """How wide the collator makes a row."""
        return self.collator.widths  # type: ignore[no-any-return]

    def batch(self, rows: list[Any]) -> Batch:
        """These rows as the model gets them."""
        return self.prepare(self.collate.collated(copy.deepcopy(rows)))


class Subject(NamedTuple):
    """What is checked.

    Attributes:
        model: unwrapped.
        loss: `loss(model, batch) -> (B,)`, each example's own.
        rules: how operations use their parameters.
        tables: the parameters whose gradients are summed by rows.
        passes: of a step.
        groups: of parameters that are clipped each by itself.
        check_losses: holds `loss` of a few examples against what it is meant to be; None where nobody else knows that.
        switches: notes what is switched off.
    """

    model: nn.Module
    loss: LossFunction
    rules: Mapping[Any, Rule]
    tables: Collection[str]
    passes: int
    groups: Sequence[Group]
    check_losses: Callable[[nn.Module, Batch, Iterable[Batch]], None] | None
    switches: Switches

    def memory(self) -> Memory:
        """What sees, and puts back, what passes leave."""
        return Memory(self.model, lambda few: self.loss(self.model, few), self.loss, self.switches, self.tables)


class Checks:
    """A model, its losses and data, held against what each example does by itself. It spends nothing.

    Args:
        subject: what is checked.
        rows: of the training data.
        is_silent: whether its progress is shown nowhere.

    Attributes:
        certificate: of the uses that were compared.
        memory: sees what a step leaves.

    Raises:
        UnsupportedModelError: per-example gradients of this model are not known to be exact.
        ConfigurationError: a collator, rows, a loss or groups that a private run cannot use.
    """

    certificate: Certificate

    def __init__(self, subject: Subject, rows: Rows, *, is_silent: bool) -> None:
        self._subject, self._rows, self.memory = subject, rows, subject.memory()
        self._moved, self._unread = list[float](), set[str]()
        if subject.passes == 2:
            refuse_two_passes(subject.model, rows.loader.draws_units)
        shown = passes_shown(subject.model, is_silent=is_silent)
        with shown, unchanged_weights(subject.model), failures_refused(), rows.collator.measuring_once():
            reads = self._check()
        # Ranks that share weights would have to look again at the same time. What passes write to is known by now.
        self._installed = None if is_sharded(subject.model) else Installed(subject.model)
        self._read = None if reads is None else AsRead(subject.model, reads)

    def knows(self, model: nn.Module) -> bool:
        """Whether its modules and hooks are those that were checked."""
        return self._installed is None or self._installed.is_of(model)

    def changed(self) -> str | None:
        """What losses read and is no more as it was checked, in words."""
        return None if self._read is None else self._read.changed()

    def note(self) -> None:
        """What losses read may have changed as it did in the step that ends here."""
        if self._read is not None:
            self._read.note()

    def hold(self, rows: list[Any]) -> None:
        """Rows that are wider or narrower than all before, held against one another."""
        self._rows.met = outermost([*self._rows.met, *rows], self._rows.widths)
        with uncompiled(), unchanged_global_state():
            known, together = self._rows.padding.counts_columns, self._rows.batch(rows)
            if self._rows.padding.counts_columns == known:
                self._check_padding(rows, len(rows))
            else:  # The first that is padded on the left: from now on all batches have positions.
                self._certify(together, rows)

    def _check(self) -> Reads | None:
        (model, loss, *_), rows, memory = self._subject, self._rows, self.memory
        dataset, widths, batch = rows.dataset, rows.widths, rows.batch
        of_short, of_whole = (NotingDraws(model, loss) for _ in range(2))
        model.train()
        check_quantised(beside(model, loss))
        with memory.restored(), uncompiled(), unchanged_global_state():
            check_order(dataset.dataset, rows.collate)  # before a row is read
            warn_of_rows_of_others(dataset.dataset, None if rows.loader.draws_units else rows.collate.collated)
            few, others = telling_rows(dataset, widths)
            memory.settle(batch([row]) for row in few)
            with memory.unchanged():
                one, other, together = alike_batches(few, batch)
                extremes = extreme_rows(dataset.dataset)
                warn_of_several(together, are_even=not extremes.uneven)
                # Where columns tell of ids, labels and lengths, what is no narrower and no wider shows no more.
                tried = rows_beyond(few, extreme := [dataset[i] for i in extremes.rows], widths)
                refuse_rows_that_fail(dataset, extremes.rows, tried, memory.apart(lambda row: of_whole(batch([row]))))
                check_dataset(dataset.dataset)
                with rows.padding.put_aside():
                    check_collator(rows.collate, few, [*extreme, *(rare := rare_rows(dataset))])
                self._unread = memory.refuse(one, other, together)
                uneven = [*uneven_rows(dataset, extremes, few), *rows.met]
                memory.rows = lambda: (batch([row]) for row in (*few, *tried, *uneven, *rare))
                # Padding first: what it shows is how all batches are completed, those of one length as well.
                batch(outermost(uneven, widths))
            # Whatever short rows switch must not stay so, nor be certified.
            short = batch(short_rows(few, batch, memory.unchanged()(of_short)))
            if of_whole.drawn - of_short.drawn:  # Longer rows are moved by numbers that short ones do not draw.
                short = batch([*few, outermost(uneven, widths)[-1]])
            try:
                ends = self._certify(short, uneven, others, rare)
            except UnseenUseError:
                ends = self._certify(batch(few), uneven, others, rare)
            if self._subject.check_losses is not None:
                self._subject.check_losses(model, short, (batch([row]) for row in few))
        memory.ask_of(short)
        reads = None if is_sharded(model) else memory.read_by(short)
        # Ranks that share weights would have to look at a wider row at the same time.
        uneven = outermost(uneven, widths, ends)
        rows.collator.check_cut(uneven, self._moved)
        rows.collator.checked = None if is_sharded(model) else Checked(uneven, widths, ends)
        return reads

    def _certify(self, together: Batch, uneven: list[Any], others: Any = (), rare: Any = ()) -> list[Any]:
        """Of `uneven`, the ends that add something. `others` may be held against these as well; `rare` rows are."""
        model, loss, rules, tables, passes, groups, check_losses, switches = self._subject
        known: dict[str, Any] = {"rules": rules, "tables": tables}
        self.certificate = preflight(model, loss, together, **known, switches=switches)
        known["certificate"] = self.certificate
        with self.memory.restored(), self.memory.unchanged():  # a mean that is kept would be NaN from now on
            check_strangers(model, loss, together, **known)
            check_outputs_apart(model, loss, together, **known, is_known=check_losses is not None)
            if passes == 2:
                check_two_passes(model, loss, together, **known)
        ends = hold(uneven, others, self._rows.widths, self._check_padding, rare)
        if len(groups) > 1 and not is_sharded(model):
            # What is refused of a backward pass in which groups are handed on.
            with unchanged_global_state(), self.memory.unchanged():
                in_groups = InGroups(model, loss, together, **known)
                in_groups.by_groups([group.names for group in groups], lambda number, group: None)
        return ends

    def _check_padding(self, rows: list[Any], number: int) -> list[float]:
        """The norms of their gradients."""
        model, loss, rules, tables, *_ = self._subject
        with self.memory.unchanged():
            return check_padding(
                model, loss, rows, self._rows.collate.collated, self._rows.prepare, certificate=self.certificate,
                rules=rules, number=number, tables=tables, note=self._moved.append, unread=self._unread,
            )  # fmt: skip
