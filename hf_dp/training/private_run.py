"""PrivateRun: a private training in a loop of one's own, where every way of using it wrongly is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.accounting import Ledger, PrivacyReport
from hf_dp.agreement import keep_step, rate_of, warn_of_drift
from hf_dp.config import PrivacyConfig
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.moving import moved
from hf_dp.figures import logged
from hf_dp.hub import saved_aside
from hf_dp.losses import known_loss_check, per_example_losses
from hf_dp.parts.part import Setting
from hf_dp.parts.table import parts_of
from hf_dp.per_example import RULES, Rule
from hf_dp.per_example.batch import LossFunction
from hf_dp.per_example.checks.preflight import check_modules
from hf_dp.training.engine import Engine
from hf_dp.training.loop_order import LogicalBatch, LoopOrder, MeanLoss, items_of_epoch, refuse_as_loop
from hf_dp.training.planned import check_data, check_privacy, check_ranks, planned, records_before, rows_and_units
from hf_dp.training.refusals import refuse_no_output_dir, refuse_own_optimizer, refuse_own_settings, unwrapped
from hf_dp.training.resuming.checkpoints import others_named, refuse_files_in_the_way
from hf_dp.training.resuming.loaded import checksums, refuse_other_values
from hf_dp.training.resuming.output_lock import alone_in
from hf_dp.training.resuming.own_checkpoints import found_checkpoint, read_into, step_of, write_checkpoint, write_model
from hf_dp.training.resuming.resume import Fingerprints, SavedRun, note_trained_by
from hf_dp.training.run import Run
from hf_dp.training.saving import claim, refuse_unclaimed, write_claim
from hf_dp.training.signature import all_given

logger = logging.getLogger(__name__)


class PrivateRun:
    """A private training in a loop of your own: in plain PyTorch, or with accelerate under DDP.

        run = PrivateRun(model, dataset, privacy, collate, expected_batch_size=64, micro_batch_size=8, steps=100)
        run.begin(optimizer, scheduler)
        for batch in run.batches():
            run.step(batch)
            optimizer.step()
            scheduler.step()
        run.save("out/final")

    On several ranks all make it and call its methods together, with the process group made before. `begin` and `step`
    put the model in training mode; between the steps it is yours to evaluate.

    Args:
        model: plain, or in DistributedDataParallel.
        dataset: rows by index; not in batches, and as the collator reads them.
        privacy: the promise.
        collate: list of examples -> mapping whose tensors have a row for each.
        expected_batch_size: the mean size of a logical batch, of all ranks together.
        micro_batch_size: the most examples that a rank computes at once.
        steps: how many are planned.
        max_tokens_per_micro_batch: of more than one row, padding included; None: any number.
        loss: `loss(model, batch) -> (B,)`, each example's own.
        rules: how operations use their parameters; see docs/rules.md.
        tokenizer: of the model (or its processor), saved beside it.
        output_dir: where checkpoints lie, with the key of what they say of the data; without it there are none.
        options: of torch's `DataLoader`, such as `num_workers` and `pin_memory`.

    Raises:
        ConfigurationError, UnsupportedModelError: data, a model or settings that would break the promise.
    """

    __iter__ = refuse_as_loop

    @all_given
    def __init__(
        self,
        model: nn.Module,
        dataset: Any,
        privacy: PrivacyConfig,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        *,
        expected_batch_size: int,
        micro_batch_size: int,
        steps: int,
        max_tokens_per_micro_batch: int | None = None,
        loss: LossFunction = per_example_losses,
        rules: Mapping[Any, Rule] = RULES,
        tokenizer: Any = None,
        output_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        sizes = {"expected_batch_size": expected_batch_size, "micro_batch_size": micro_batch_size, "steps": steps}
        cap = {"max_tokens_per_micro_batch": max_tokens_per_micro_batch}
        self.privacy, self._step, self._micro_batch_size = privacy, 0, micro_batch_size
        with ranks.together():
            check_privacy(privacy)
            self._output_dir, self.model = refuse_own_settings(sizes, options, output_dir, loss), unwrapped(model)
            for part in parts_of(privacy).values():
                part.refuse(Setting(privacy))
            check_data(dataset, expected_batch_size, privacy, earlier := records_before(privacy))
            check_modules(self.model)
            check_ranks(dataset, self.model, {**sizes, **cap, "PrivacyConfig": privacy.to_dict()})
        rows, units = rows_and_units(dataset, privacy)
        plan, self._loader = planned(
            privacy, self.model, rows, collate, expected_batch_size=expected_batch_size,
            micro_batch_size=micro_batch_size, steps=lambda _: steps, units=units, earlier=earlier, **cap, **options,
        )  # fmt: skip
        padding = LeftPadding(loss is per_example_losses)

        def prepare(batch: Any) -> Any:
            return padding.completed(self.model, moved(batch, next(self.model.parameters()).device), batch)

        known = known_loss_check(self.model) if loss is per_example_losses else None
        engine = Engine(self.model, loss, self._loader, prepare, padding, rules, known)
        self._run, self._dataset, self._tokenizer = Run(plan, engine, tokenizer=tokenizer), dataset, tokenizer
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._generators: dict[str, Any] = {}
        self._fingerprints, self._order, self._lock = Fingerprints(), LoopOrder(self.model), ExitStack()

    @property
    def global_step(self) -> int:
        """How many steps of this training were taken, those before a checkpoint too."""
        return self._step

    @property
    def steps(self) -> int:
        """How many are planned."""
        return self._run.plan.steps

    @property
    def ledger(self) -> Ledger:
        """What was spent, by this training and before its checkpoint."""
        return self._run.ledger

    # --- the beginning --------------------------------------------------------------------------------------------

    def make_optimizer(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """What `make` makes of the trainable parameters; needed with parts that put an optimizer of their own beside
        it, and before DDP wraps the model."""
        return self._run.make_optimizer(lambda: make([p for p in self.model.parameters() if p.requires_grad]), None)

    def begin(
        self, optimizer: Any, scheduler: Any = None, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None
    ) -> None:
        """Checks everything, and spends nothing but what parts release; or goes on from a checkpoint.

        Args:
            optimizer, scheduler: that will step, plain or as accelerate wrapped it, and that of its rates, if any.
            resume_from_checkpoint: a folder, or True for the newest whole one in the output directory, if any. The
                ledger, weights, optimizer, scheduler and generators go on as if there had been no break.

        Raises:
            ConfigurationError, UnsupportedModelError: what a private run cannot use, or what is not known to be exact.
            LedgerError: a checkpoint of other data, config, weights or optimizer, damaged or changed.
            BudgetExceededError: the budget was already spent.
        """
        with ranks.together(), ExitStack() as lock:
            self._order.refuse_second_beginning()
            refuse_own_optimizer(optimizer, self.model, scheduler, self.privacy)
            if resume_from_checkpoint is True:
                refuse_no_output_dir(self._output_dir, "resume_from_checkpoint=True")
            if self._output_dir is not None:
                refuse_files_in_the_way(str(self._output_dir))
                lock.enter_context(alone_in(self._output_dir))
            self._optimizer, self._scheduler = optimizer, scheduler
            lock.callback(self._run.end)
            self._begin(found_checkpoint(resume_from_checkpoint, self._output_dir, self.privacy))
            self._lock = lock.pop_all()
        self._order.begin()

    def _begin(self, checkpoint: Path | None) -> None:
        run, data = self._run, self._dataset
        saved = None if checkpoint is None else SavedRun.read(checkpoint)
        with others_named(checkpoint, lambda other: SavedRun.read(other).check(run.plan.promise, data)):
            run.go_on(run.ledger, saved, data, owner=self)
        if checkpoint is not None and saved is not None:
            self._step = step_of(checkpoint)
            note_trained_by(self.model, saved, saved.ledger)  # as long as this run has not begun
            self._generators = read_into(checkpoint, self.model, self._optimizer, self._scheduler)
            refuse_other_values(checkpoint, saved.values, self.model, self._optimizer)
        around = self._order.around(self._after_optimizer_step)
        run.begin(self._optimizer, checkpoint, self.global_step, owner=self, around=around)

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def budget_is_left(self) -> bool:
        """Whether the promised budget pays for another step."""
        return self._run.budget_is_left

    def batches(self) -> Iterator[LogicalBatch]:
        """The logical batches from where the training stands to its end; some may be empty, and are steps like others.

        After a `break` the next call goes on. At the end of the steps, or of the budget, the run ends.

        Raises:
            ConfigurationError: the run has not begun, or the batch before was not used as it must be.
        """
        return self._batches(self._order.new_loop())

    def _batches(self, loop: int) -> Iterator[LogicalBatch]:
        while self._goes_on:
            for item in items_of_epoch(self._loader, self.global_step, self._generators):
                yield self._order.draw(item)
                self._order.refuse_unused(loop)
                if not self._goes_on:
                    break
        if not self._order.has_ended:
            if self.global_step < self.steps:
                ranks.warn(logger, "Training stops: the privacy budget is spent. Another step would exceed it.")
            keep_step(self.global_step, "stops")
            self.end()

    @property
    def _goes_on(self) -> bool:
        return self.global_step < self.steps and self.budget_is_left and not self._order.has_ended

    def step(self, batch: LogicalBatch) -> float:
        """The noisy mean gradient of one batch, in the `.grad` of the parameters, for the optimizer to take as it is.

        Returns:
            The mean loss of its examples, an exact function of the private data; 0 where the promise withholds it.

        Raises:
            BudgetExceededError: the budget pays for no further step.
            ConfigurationError: a batch that is not the latest of `batches`, a gradient that no optimizer took, or
                weights that something else has moved.
        """
        with ranks.together(), self._order.used(batch, self.ledger, self._optimizer) as item:
            keep_step(self.global_step, "goes on", rate_of(self._optimizer))
            self.model.train()
            mean = self._run.step(item).mean_loss
            self._step += 1
        return MeanLoss(0.0 if self._run.plan.config.withhold_non_private_logs else mean)

    def _after_optimizer_step(self) -> None:
        """Called by the optimizer itself, before anything else can change its rates or the gradients."""
        self._run.after_optimizer_step(self._optimizer)
        self._order.taken()

    def end(self) -> None:
        """The run takes no further step, and the optimizer may take any gradient; the output directory is free."""
        self._order.end()
        self._lock.close()

    # --- what comes out -------------------------------------------------------------------------------------------

    def logs(self) -> dict[str, float]:
        """Epsilon, noise, and what happened since the last call, in exact numbers unless these are withheld."""
        plan = self._run.plan
        return {
            **logged(self.ledger.epsilon(plan.delta, self.privacy.accountant), plan.noise_multiplier),
            **self._run.logs().shown(plan.config.withhold_non_private_logs),
        }

    def report(self) -> PrivacyReport:
        """What was promised and what was spent so far."""
        return self._run.plan.report(self.ledger)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the model with `privacy.json` and its card, which `hf-dp verify` reads, by the first rank.

        What was saved there before stays until all is written.
        """
        self._order.refuse_unsteady("save()")
        if ranks.rank() == 0:
            self._save(Path(directory))

    def _save(self, directory: Path) -> None:
        refuse_unclaimed(self.model, self)
        record = claim(self._run.plan, self.ledger)
        with saved_aside(directory) as aside:
            write_model(aside, self.model, self._tokenizer)
            self._run.save_beside(aside)
            write_claim(aside, directory.absolute().name, record, self.model)

    def save_checkpoint(self) -> Path:
        """Writes `checkpoint-STEP` in the output directory, whole or not at all, to resume from. All ranks call it.

        Raises:
            ConfigurationError: no output directory, or the optimizer has not stepped yet.
        """
        output_dir = refuse_no_output_dir(self._output_dir, "save_checkpoint()")
        self._order.refuse_unsteady("save_checkpoint()")
        values = checksums(self.model, self._optimizer)
        with ranks.together(), alone_in(output_dir) if self._order.has_ended else nullcontext():
            keep_step(self.global_step, "saves")
            warn_of_drift(values)
            return write_checkpoint(
                output_dir, self.global_step, self.steps, self._micro_batch_size,
                lambda: self._fingerprints.saved(self.ledger, self._dataset, output_dir, values, self.privacy.unit),
                self._save, self._optimizer, self._scheduler,
            )  # fmt: skip
