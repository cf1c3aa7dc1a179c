"""One private run, whatever loop it is in: plan, ledger, engine and parts, from the beginning to each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dp.accounting import Ledger
from hf_dp.accounting.earlier import charge
from hf_dp.accounting.events import check_mechanisms
from hf_dp.agreement import agree
from hf_dp.data.failing_rows import explained_in_a_step
from hf_dp.errors import ConfigurationError
from hf_dp.parts.part import Logs, Part, Setting
from hf_dp.parts.table import PARTS, parts_of
from hf_dp.per_example import Certificate, PerExampleGradients
from hf_dp.per_example.sharding import is_sharded, refuse_broken_ties, tied
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.step.magnitudes import Magnitudes
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from hf_dp.step.written import Around, WrittenGradients
from hf_dp.training.described import described_optimizer, described_values
from hf_dp.training.engine import Engine, MicroBatch
from hf_dp.training.progress import Clock, opening, say
from hf_dp.training.refusals import refuse_adapters_in_part, refuse_optimizer, refuse_other_surroundings, surroundings
from hf_dp.training.resuming.copies import Leaving, refuse_copies
from hf_dp.training.resuming.goes_on import continued
from hf_dp.training.resuming.origin import refuse_unsaid_origin, warn_of_origin
from hf_dp.training.resuming.resume import SavedRun, note_trained_by, refuse_trained_by_another
from hf_dp.training.resuming.same_rows import OtherPeople
from hf_dp.training.same_losses import check_together
from hf_dp.training.tokenizer_settings import note_tokenizers


class Run:
    """One training. Until it has begun nothing is spent, and what is accounted for is the one that began before it.

    Args:
        plan: of this training.
        engine: of its model and data.
        before: the latest training of the same model, begun or refused.
        tokenizer: of the model, for parts that read texts.

    Attributes:
        parts: of this training, by their names.
        by_rows: the parameters whose gradients are summed by rows. They belong to the optimizer, and so stay.
        ledger: what was spent, by this training and by those before it.
    """

    def __init__(self, plan: Plan, engine: Engine, before: Run | None = None, tokenizer: Any = None) -> None:
        self.plan, self.engine, self.tokenizer = plan, engine, tokenizer
        note_tokenizers(tokenizer, engine.collate)
        self.parts = parts_of(plan.config)
        self.by_rows: dict[str, nn.Parameter] = {} if before is None else before.by_rows
        self.ledger = Ledger()
        self.optimizer: torch.optim.Optimizer | None = None
        self._earlier = None if before is None else before.begun
        # What was released in a beginning that failed is in the ledger too, and not to be released again.
        self._known: dict[str, Part] = {} if before is None else before._known
        self._written: WrittenGradients | None = None
        self._magnitudes: Magnitudes | None = None
        self._has_begun, self._ties = False, tied(engine.model)
        self._surroundings, self._statistics = dict[str, object](), {"examples": 0, "clipped": 0, "non_finite": 0}
        self._leaving: Leaving | None = None  # until something may be released

    @property
    def begun(self) -> Run | None:
        """The latest training that began: a refused one has released nothing."""
        return self if self._has_begun else self._earlier

    @property
    def model(self) -> nn.Module:
        """Unwrapped."""
        return self.engine.model

    @property
    def loader(self) -> Any:
        """Of the training data."""
        return self.engine.loader

    # --- the beginning --------------------------------------------------------------------------------------------

    def make_optimizer(
        self, make: Callable[[], torch.optim.Optimizer], given: torch.optim.Optimizer | None, weight_decay: float = 0.0
    ) -> torch.optim.Optimizer:
        """What `make` makes, or gives back where there is a `given` one, as the parts would have it."""
        self.optimizer = given

        def before(part: Part, rest: Callable[[], torch.optim.Optimizer]) -> Callable[[], torch.optim.Optimizer]:
            return lambda: part.make_optimizer(self, rest, weight_decay)

        for part in reversed(self.parts.values()):
            make = before(part, make)
        return make()

    def go_on(
        self, ledger: Ledger, saved: SavedRun | None, dataset: Any, owner: object, beside: Sequence[nn.Module] = ()
    ) -> Ledger:
        """The ledger that this training goes on with, in place of `ledger`: of a checkpoint, or one that begins.

        Args:
            ledger: of this process so far.
            saved: of the checkpoint whose weights were read; None if there was none.
            dataset: the training data.
            owner: of `ledger`.
            beside: further models that gradients follow from.

        Raises:
            LedgerError: a checkpoint or an earlier training with other data, config or length.
            BudgetExceededError: the budget was already spent.
            ConfigurationError: more kinds of steps with those of before than a record is verified with.
        """
        for kind in PARTS.values():
            kind.wrapped(self.model)
        others = OtherPeople(self.plan, dataset, ledger)
        for model, read in ((self.model, saved), *((other, None) for other in beside)):
            refuse_trained_by_another(model, owner, read, self.plan, others)
            refuse_unsaid_origin(model, ledger, read, self.plan)
            refuse_copies(model, owner, read, self.plan, others)
        if saved is None:
            warn_of_origin(self.model, self.tokenizer, ledger, self.plan)
        else:
            self.plan = self.plan.continuing(saved.ledger)
        found = continued(ledger, saved, self.plan, dataset, self._earlier.plan if self._earlier else None)
        check_mechanisms("those in the ledger", found.event, self.plan.mechanism.event)
        self.ledger = found
        self.ledger.promise = self.plan.promise
        charge(self.ledger, self.plan.mechanism.earlier)
        return self.ledger

    def begin(
        self,
        optimizer: torch.optim.Optimizer,
        checkpoint: Path | None,
        step: int,
        owner: object,
        around: Around | None = None,
    ) -> None:
        """Holds the engine against the oracle; then the parts begin.

        Args:
            optimizer: as it is to step.
            checkpoint: that the weights were read from; None if there was none.
            step: the number of steps that were taken before.
            owner: see `go_on`.
            around: see `WrittenGradients`.

        Raises:
            UnsupportedModelError: per-example gradients of this model are not known to be exact.
            ConfigurationError: what a private run cannot use.
        """
        self.loader.refuse_other_ranks()
        self.optimizer, self._surroundings, model = optimizer, surroundings(self.model), self.model
        refuse_adapters_in_part(model)
        for part in self.parts.values():
            part.refuse(Setting(self.plan.config, is_sharded(model)))
        said = {"the promise": self.plan.promise, "the step to begin at": step, "the ledger": self.ledger.to_dict()}
        agree({**said, **described_optimizer(optimizer), **described_values(model)})
        refuse_broken_ties(self._ties, model)
        restored, by_rows = checkpoint is not None, self.by_rows.values()
        refuse_optimizer(optimizer, model, is_complete=True, is_restored=restored, by_rows=by_rows)
        self._written = WrittenGradients(optimizer, around, model)
        self._magnitudes = Magnitudes(self.plan, model, self.by_rows)
        say("\n".join(opening(self.plan, model, optimizer)))
        self.engine.by_rows, self.engine.passes = self.by_rows, self.plan.config.passes
        self.engine.clipping = self.plan.clipping
        self._remove_parts()
        try:
            for part in self.parts.values():
                part.install(self)
            self._clock = Clock(self.plan, step, self.ledger.steps)
            check_together(self.engine)
            self._clock.checked()
            for part in self.parts.values():
                part.checked(self)
            # Before a part writes into the model what it releases.
            note_trained_by(model, owner, self.ledger)
            self._leaving = Leaving(model, optimizer, owner, self.ledger)
            for name, part in self.parts.items():
                part.begin(self, checkpoint, self._known.get(name))
                self._known = {**self._known, name: part}
        except BaseException:
            self._remove_parts()
            raise
        # Only now: what an earlier training released is not forgotten, nor told under a plan, by one that is refused.
        self._has_begun, self._earlier, self._known = True, None, self.parts

    def _remove_parts(self) -> None:
        for kind in PARTS.values():
            kind.remove(self.model)

    # --- what parts ask -------------------------------------------------------------------------------------------

    def uses(self) -> Certificate:
        """See `Engine.uses`."""
        return self.engine.uses()

    def record(self, micro_batch: MicroBatch) -> PerExampleGradients:
        """See `Engine.record`."""
        return self.engine.record(micro_batch)

    def examples(self, indices: Sequence[int]) -> Iterator[MicroBatch]:
        """See `Engine.examples`."""
        return self.engine.examples(indices, math.ceil(self.plan.sampler.expected_batch_size))

    # --- one step -------------------------------------------------------------------------------------------------

    @property
    def budget_is_left(self) -> bool:
        """Whether the promised budget pays for another step."""
        return self.ledger.steps < self.plan.budgeted_steps

    def step(self, item: Mapping[str, Any]) -> ClippedSum:
        """One private gradient from one item of the loader, in the `.grad` of the parameters.

        Raises:
            BudgetExceededError: the budget pays for no further step.
            ConfigurationError: the training has not begun.
        """
        if not self._has_begun or self._written is None:
            raise ConfigurationError(
                "a private step of a training that has not begun, or has ended.",
                why="what is checked before the first step was not, or was refused, or the rows may be of another.",
                fix="call begin(), or train() of a trainer, and no step where it raises, or outside of it.",
            )
        self._clock.begins()
        refuse_other_surroundings(self._surroundings, self.model)
        self._written.refuse_other_state()
        if self.budget_is_left:
            for part in self.parts.values():
                part.before_step(self)
        by_rows = next((part.rows for part in self.parts.values() if part.rows is not None), None)
        # Closed where the step fails, whoever holds its traceback.
        with closing(self.engine.micro_batches(item)) as batches, explained_in_a_step():
            total = private_gradient(
                *(self.model, self._restricted, batches, self.plan, self.ledger),
                by_rows=by_rows, dummies=self.engine.dummies(item),
            )  # fmt: skip
        self._written.note(self.model)
        for part in self.parts.values():
            part.after_step()
        self._statistics = {name: seen + getattr(total, name) for name, seen in self._statistics.items()}
        return total

    def _restricted(self, micro_batch: MicroBatch) -> PerExampleGradients:
        gradients = self.engine.to_sum(micro_batch)
        for part in self.parts.values():
            gradients = part.restrict(gradients)
        return gradients

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at what the optimizer did.

        Raises:
            HfDpError: another optimizer stepped.
            ConfigurationError: the weights are lost.
        """
        assert self._written is not None
        assert self._magnitudes is not None
        assert self._leaving is not None
        self._leaving.after_step()
        self._written.refuse_untaken()
        self._magnitudes.after_step(self.model, optimizer)
        for part in self.parts.values():
            part.after_optimizer_step(optimizer)
        self._clock.stepped()

    def end(self) -> None:
        """The optimizer may take any gradient again."""
        written, self._written = self._written, None
        if written is not None:
            written.forget()
        if self._leaving is not None:
            self._leaving.at_end()
        if self._earlier is not None:
            self._earlier.end()

    # --- what comes out -------------------------------------------------------------------------------------------

    def logs(self) -> Logs:
        """What happened since the last call."""
        seen, self._statistics = self._statistics, dict.fromkeys(self._statistics, 0)
        clipped = seen["clipped"] / max(1, seen["examples"])
        exact = {"clipped_fraction": clipped, "non_finite_examples": seen["non_finite"]}
        logs = Logs({} if self._magnitudes is None else self._magnitudes.known, exact)
        for name, part in self.parts.items():
            logs |= part.logs().under(name)
        return logs

    def save_beside(self, directory: Path) -> None:
        """Writes what belongs to the model and is not in its weights."""
        for part in self.parts.values():
            part.save(directory)
