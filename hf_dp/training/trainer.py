"""DPTrainer: Transformers' Trainer with a private training step. Nothing of Trainer's loop is copied."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import seed_worker

import hf_dp.accounting as accounting
import hf_dp.ranks as ranks
from hf_dp.agreement import agree, difference, warn_if_alone
from hf_dp.config import PrivacyConfig
from hf_dp.data.extremes import extreme_rows
from hf_dp.data.fingerprint import Fingerprint, fingerprint, fingerprint_key
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.loader import LogicalBatchCollator, PoissonDataLoader, RankSampler
from hf_dp.data.mixing_collator import check_collator
from hf_dp.data.telling_rows import refuse_rows_that_fail, short_rows, telling_rows, uneven_rows
from hf_dp.data.widths import Checked
from hf_dp.errors import ConfigurationError, UnseenUseError
from hf_dp.losses import check_own_loss, per_example_losses
from hf_dp.parts.re_attention import remove_re_attention
from hf_dp.parts.re_attention.part import AttentionNoise, token_ids, without_idle_release
from hf_dp.parts.sparse_embeddings import TableRows, find_tables, with_lazy_rows
from hf_dp.parts.sparse_embeddings.part import SparseTraining, frozen, hide_from_wrapper, show_to_wrapper
from hf_dp.per_example import RULES, Certificate, PerExampleGradients, Rule, preflight, record
from hf_dp.per_example.batch import Batch
from hf_dp.per_example.independence import survey
from hf_dp.per_example.padding import check_padding
from hf_dp.per_example.preflight import check_modules
from hf_dp.per_example.sharding import is_sharded, refuse_broken_ties, tied
from hf_dp.per_example.state import unchanged_state
from hf_dp.randomness import Entropy, unchanged_global_state
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.step.magnitudes import Magnitudes
from hf_dp.step.plan import Plan
from hf_dp.step.private_gradient import private_gradient
from hf_dp.step.written import WrittenGradients, gradient_norm
from hf_dp.training.callbacks import PrivacyCallback
from hf_dp.training.checkpoints import CheckpointMixin, others_named, refuse_half
from hf_dp.training.described import (
    described_arguments,
    described_data,
    described_model,
    described_optimizer,
    described_setup,
    described_values,
)
from hf_dp.training.layouts import LayoutsMixin
from hf_dp.training.loaded import refuse_other_values
from hf_dp.training.output_lock import alone_in
from hf_dp.training.publishing import PublishingMixin
from hf_dp.training.refusals import (
    private_arguments,
    refuse_dataset,
    refuse_optimizer,
    refuse_overrides,
    refuse_parallel_model,
    refuse_sharded_parts,
    refuse_weight_decay,
)
from hf_dp.training.restoring import RestoringMixin
from hf_dp.training.resume import SavedRun, continued, note_trained_by, refuse_trained_by_another
from hf_dp.training.sft import forget_batch_metrics, refuse_sft

logger = logging.getLogger(__name__)

_UNKNOWN: Any = object()
_CORRECTION, _SPARSE = "re_attention/", "sparse_embeddings/"
_WITHHELD = (
    *("loss", "train_loss", "clipped_fraction", "non_finite_examples", "num_input_tokens_seen", "total_flos"),
    f"{_SPARSE}false_positives",
)


class DPTrainerMixin(RestoringMixin, CheckpointMixin, LayoutsMixin, PublishingMixin):
    """Makes any Trainer subclass train with DP-SGD: `class MyTrainer(DPTrainerMixin, MyBaseTrainer)`.

    One dataloader item is one logical batch, Poisson-sampled with expected size `per_device_train_batch_size` x
    `gradient_accumulation_steps` x processes; `per_device_train_batch_size` is the micro-batch. In the trainer's own
    copy of the arguments `gradient_accumulation_steps` is 1 and `max_grad_norm` is 0; yours are left alone.

    Args:
        privacy: the promise. All other arguments are those of the Trainer behind this class.

    Raises:
        ConfigurationError: arguments, data or overrides that would break the guarantee.
        UnsupportedModelError: a model that cannot be trained privately.
    """

    #: How operations use their parameters. Extend it for operations of your own; see docs/rules.md.
    per_example_rules: Mapping[Any, Rule] = RULES

    def __init__(self, *args: Any, privacy: PrivacyConfig, **kwargs: Any) -> None:
        if not isinstance(privacy, PrivacyConfig):
            raise ConfigurationError(
                f"privacy={privacy!r}.",
                why="without a PrivacyConfig there is no promise to keep.",
                fix="pass privacy=PrivacyConfig(target_epsilon=8.0).",
            )
        self.privacy = privacy
        self.ledger = accounting.Ledger()
        self._plan: Plan | None = None
        self._next_plan: Plan | None = None
        self._certificate: Certificate | None = None
        self._left_padding = LeftPadding()
        self._saved_run: SavedRun | None = None
        self._checkpoint: Path | None = None
        self._attention_noise: AttentionNoise | None = None
        self._ties: set[frozenset[str]] = set()
        self._tables: dict[str, nn.Parameter] = {}
        self._sparse: SparseTraining | None = None
        self._written: WrittenGradients | None = None
        self._magnitudes: Magnitudes | None = None
        self._fingerprint: Fingerprint | None = _UNKNOWN
        self._statistics = {"examples": 0, "clipped": 0, "non_finite": 0}
        super().__init__(*args, **kwargs)
        self._privacy_callback = PrivacyCallback(self)
        self.add_callback(self._privacy_callback)
        forget_batch_metrics(self)  # where it cannot, that is refused now

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; refuses an output directory in which another training is at work, and where a rank fails, the
        others say why.
        """
        with ranks.together(), alone_in(self._output_dir):
            try:
                return super().train(*args, **kwargs)
            finally:
                if self._written is not None:
                    self._written.forget()

    # --- before training ------------------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        user_args = self.args
        self.args = private_arguments(user_args)
        self._expected_batch_size = (
            user_args.train_batch_size * user_args.gradient_accumulation_steps * ranks.world_size()
        )
        refuse_overrides(self, DPTrainerMixin, Trainer)
        refuse_sft(self, own_loss=not self._has_usual_loss)
        refuse_parallel_model(self, self._module)
        refuse_sharded_parts(self, self.privacy)
        if self.train_dataset is not None:
            self._check_dataset()
            check_modules(self._module)
            refuse_optimizer(self.optimizer, self._module)
        super()._validate_args()

    def _check_dataset(self) -> None:
        refuse_dataset(self.train_dataset)
        n = self._make_sampler(Entropy(0)).dataset_size
        accounting.check_delta(self.privacy.target_delta or accounting.default_delta(n), n)

    def _check_ranks(self) -> None:
        """Refuses ranks that differ, before the model is wrapped, which may overwrite what differs."""
        warn_if_alone()
        self._ties = tied(self._module)
        data, model = described_data(self.train_dataset), described_model(self._module)
        # Of its factors, `self.args` no longer has the user's gradient_accumulation_steps.
        batch = {"the expected batch size": self._expected_batch_size, "PrivacyConfig": self.privacy.to_dict()}
        agree({**batch, **described_arguments(self.args), **described_setup(self.accelerator), **data, **model})
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and not plugin.cpu_ram_efficient_loading:
            agree(described_values(self._module))
        elif plugin is None and (found := difference(described_values(self._module))) is not None:
            ranks.warn(logger, "%s; DDP replaces them by rank 0's.", found)

    def _make_sampler(self, entropy: Entropy) -> PoissonBatchSampler:
        dataset: Any = self.train_dataset
        return PoissonBatchSampler(len(dataset), self._expected_batch_size, entropy)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected logical batch size."""
        return self._expected_batch_size

    def get_train_dataloader(self) -> PoissonDataLoader:
        """A loader whose items are logical batches, and the plan that goes with its sampler."""
        if self.train_dataset is None:
            raise ConfigurationError(
                "DPTrainer has no train_dataset.", why="there is nothing to train on.", fix="pass train_dataset=..."
            )
        self._check_dataset()
        self._check_ranks()
        entropy = Entropy.of_all_ranks(self.privacy.seed)
        sampler = self._make_sampler(entropy)
        loader = self._make_loader(sampler)
        steps = self.set_initial_training_values(self.args, loader)[-1]
        self._next_plan = Plan.make(without_idle_release(self.privacy, self._module), sampler, int(steps), entropy)
        return loader

    def _make_loader(self, sampler: PoissonBatchSampler) -> PoissonDataLoader:
        dataset: Any = self.train_dataset
        collate = self.data_collator
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        workers, size = self.args.dataloader_num_workers, self.args.per_device_train_batch_size
        return PoissonDataLoader(
            dataset,
            batch_sampler=RankSampler(sampler, ranks.rank(), ranks.world_size(), size),
            collate_fn=LogicalBatchCollator(size, collate, reproducible=self.privacy.seed is not None),
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            worker_init_fn=functools.partial(seed_worker, num_workers=workers, rank=self.args.process_index),
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As Trainer's; embedding tables with sparse gradients get a lazy optimizer beside it."""
        config = self.privacy.sparse_embeddings
        if config is None or (self.optimizer is not None and self._tables):
            return super().create_optimizer(model)
        loader: Any = self._make_loader(self._require_plan().sampler)
        self._module.train()
        with unchanged_global_state(), unchanged_state(self._module):
            rows = telling_rows(loader.dataset, loader.collate_fn.widths)
            few: Batch = self._prepare_inputs(loader.collate_fn.collated(rows))
            uses = survey(self._module, self._loss, few, rules=self.per_example_rules)
        tables = find_tables(self._module, uses | uses.read, config.tables)
        refuse_weight_decay(self, tables)
        if self.optimizer is None:
            # Trainer leaves out what is frozen.
            with frozen(tables.values()):
                super().create_optimizer(model)
        assert self.optimizer is not None
        self.optimizer = with_lazy_rows(self.optimizer, tables, config)
        self._tables = tables
        hide_from_wrapper(self._module, tables)
        return self.optimizer

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        # Trainer's option to restore callbacks makes new ones; ours is bound to this trainer.
        self.remove_callback(PrivacyCallback)
        self.add_callback(self._privacy_callback)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        refuse_half(resume_from_checkpoint)
        # A checkpoint without a ledger is refused before its weights are read.
        self._saved_run, self._checkpoint = SavedRun.read(resume_from_checkpoint), Path(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def begin_private_run(self, state: TrainerState) -> None:
        """Continues the ledger of a checkpoint, or begins one; then holds the engine against the oracle.

        Raises:
            LedgerError: a checkpoint with a ledger for other data, config or length.
            BudgetExceededError: the budget was already spent.
            UnsupportedModelError: per-example gradients of this model are not known to be exact.
        """
        show_to_wrapper(self._module)
        plan = self._require_plan()
        saved, self._saved_run = self._saved_run, None
        assert saved is not None or not state.global_step, "steps were taken before, but no checkpoint was read"
        refuse_trained_by_another(self._module, self, saved)
        checkpoint = None if saved is None else self._checkpoint
        with others_named(checkpoint, lambda other: SavedRun.read(other).check(plan.promise, self.train_dataset)):
            self.ledger = continued(self.ledger, saved, plan, self.train_dataset)
        self.ledger.promise = plan.promise
        agree(
            {
                "the promise": plan.promise,
                "the step to begin at": state.global_step,
                "the ledger": self.ledger.to_dict(),
                **described_optimizer(self.optimizer),
                **described_values(self._module),
            }
        )
        refuse_broken_ties(self._ties, self._module)
        refuse_optimizer(self.optimizer, self._module)
        if saved is not None:
            refuse_other_values(self._checkpoint, saved.values, self._module, self.optimizer)
        self._written, self._magnitudes = WrittenGradients(self.optimizer), Magnitudes(plan, self._module)
        # A warning, so that it is seen: the default delta, and an argument that is not what the user left it at.
        ranks.warn(
            logger, "Private training: %s. max_grad_norm is set to 0: gradients are clipped for each example.", plan
        )
        noise, sparse = None, None
        remove_re_attention(self._module)
        try:
            if plan.config.re_attention is not None:
                noise = AttentionNoise(
                    self._module, plan.config.re_attention, plan, self.optimizer, self.processing_class
                )
            self._preflight()
            if plan.config.sparse_embeddings is not None:
                sparse = SparseTraining(self._tables, plan.config.sparse_embeddings, plan)
                sparse.begin(checkpoint, self._sparse)
            if noise is not None:
                examples = token_ids(self.callback_handler.train_dataloader, self._module)
                noise.begin(self.ledger, examples, checkpoint, self._attention_noise)
        except BaseException:
            remove_re_attention(self._module)
            raise
        note_trained_by(self._module, self, self.ledger)
        # Not before: what an earlier attempt released must not be forgotten by one that fails.
        self._attention_noise, self._sparse = noise, sparse
        # Nor must what was trained be reported under a plan that was refused.
        self._plan, self._next_plan = plan, None

    def after_optimizer_step(self) -> None:
        """Looks at what the optimizer did, and keeps Re-Attention in step with the noise."""
        assert self._written is not None
        assert self._magnitudes is not None
        assert self.optimizer is not None
        self._written.refuse_untaken()
        self._magnitudes.refuse_lost_weights(self._module, self.optimizer.param_groups[0]["lr"])
        if self._attention_noise is not None:
            self._attention_noise.after_optimizer_step(self.optimizer)

    def checkpoint_record(self) -> dict[str, Any]:
        """What a checkpoint keeps: the ledger, and a keyed fingerprint of the data."""
        # Every rank is asked, and one writes.
        key = fingerprint_key(self._output_dir, create=True) if ranks.rank() == 0 else None
        if self._fingerprint is _UNKNOWN and self.train_dataset is not None:
            self._fingerprint = fingerprint(self.train_dataset, key) if key else None
        saved = SavedRun(self.ledger, self._fingerprint, key, self._values_to_save)
        return saved.record(dataclasses.asdict(self.state))

    def _preflight(self) -> None:
        ranks.warn(logger, "Checking the model, the collator and the data before the first step.")
        loader: Any = self.callback_handler.train_dataloader
        collate = loader.collate_fn

        def batch(chosen: list[Any]) -> Batch:
            prepared: Batch = self._prepare_inputs(collate.collated(chosen))
            return prepared

        def loss(given: Batch) -> Tensor:
            # Whatever short rows switch must not stay so, nor be certified.
            with unchanged_state(self._module):
                return self._loss(self._module, given)

        self._module.train()
        with unchanged_global_state():
            with unchanged_state(self._module):
                few = telling_rows(loader.dataset, collate.widths)
                _, extremes = batch(few), extreme_rows(loader.dataset.dataset)
                refuse_rows_that_fail(
                    loader.dataset, extremes.rows, few, lambda row: self._loss(self._module, batch([row]))
                )
                check_collator(collate, few)
                uneven = uneven_rows(loader.dataset, extremes, few, collate.widths)
                # Padding first: what it shows is how all batches are completed, those of one length as well.
                batch(uneven)
            short = batch(short_rows(few, batch, loss))
            try:
                self._certify(short, uneven)
            except UnseenUseError:
                self._certify(batch(few), uneven)
            if self._has_usual_loss:
                check_own_loss(self._module, short)
        # Ranks that share weights would have to look at a wider row at the same time.
        collate.checked = None if is_sharded(self._module) else Checked(uneven, collate.widths)

    def _certify(self, together: Batch, uneven: list[Any]) -> None:
        self._certificate = preflight(
            self._module, self._loss, together, rules=self.per_example_rules, tables=self._tables
        )
        self._check_padding(uneven)

    def _check_padding(self, rows: list[Any]) -> None:
        loader: Any = self.callback_handler.train_dataloader
        with unchanged_state(self._module):
            check_padding(
                self._module,
                self._loss,
                rows,
                lambda chosen: self._prepare_inputs(loader.collate_fn.collated(chosen)),
                certificate=self._certificate,
                rules=self.per_example_rules,
                tables=self._tables,
            )

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As Trainer's, in training and in evaluation; what is padded on the left is completed."""
        return self._left_padding.completed(self._module, super()._prepare_inputs(inputs))

    # --- one step -------------------------------------------------------------------------------------------------

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of each example of one micro-batch by itself. Override it for a loss of your own.

        Args:
            model: the model, unwrapped.
            inputs: what the data collator returned, on the model's device: tensors (B, ...).

        Returns:
            (B,): entry i must depend on example i alone.
        """
        return per_example_losses(model, inputs, label_smoothing=self.args.label_smoothing_factor)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; none after the last step, where Trainer resumed from its checkpoint would make one more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One private gradient from one logical batch; returns the mean loss of its examples (not private)."""
        if self._privacy_callback not in self.callback_handler.callbacks or self._certificate is None:
            raise ConfigurationError(
                "PrivacyCallback was removed, or training_step was called outside train().",
                why="it keeps the ledger in the checkpoints and stops training at the end of the budget.",
                fix="leave the callback in place, and train with DPTrainer.train().",
            )
        model.train()
        switch = getattr(self.optimizer, "train", None)
        if callable(switch):
            switch()
        unwrapped = self.accelerator.unwrap_model(model)
        rows = None if self._sparse is None else self._chosen_rows(self._sparse, unwrapped)
        total = private_gradient(
            unwrapped,
            functools.partial(self._record, unwrapped),
            self._micro_batches(inputs),
            self._require_plan(),
            self.ledger,
            tables=rows,
            dummies=map(self._prepare_inputs, inputs["dummies"]),
        )
        assert self._written is not None
        self._written.note(unwrapped)
        if self._attention_noise is not None:
            self._attention_noise.after_private_step()
        if self._sparse is not None:
            self._sparse.note()
        return self._note(total)

    def _micro_batches(self, inputs: dict[str, Any]) -> Iterator[Batch]:
        """Of one logical batch, once those that are wider or narrower than all before are known to do no harm."""
        loader: Any = self.callback_handler.train_dataloader
        for rows in inputs.get("unlike", []):
            with unchanged_global_state():
                known = self._left_padding.counts_columns
                together = self._prepare_inputs(loader.collate_fn.collated(rows))
                if self._left_padding.counts_columns == known:
                    self._check_padding(rows)
                else:  # The first that is padded on the left: from now on all batches have positions.
                    self._certify(together, rows)
        return map(self._prepare_inputs, inputs["micro_batches"])

    def _chosen_rows(self, sparse: SparseTraining, model: nn.Module) -> TableRows | None:
        """The embedding tables of the next step; DP-FEST's rows are chosen where it is time to."""
        loader: Any = self.callback_handler.train_dataloader

        def examples(rows: Sequence[int]) -> Iterator[Batch]:
            for start in range(0, len(rows), self._expected_batch_size):
                few = list(rows[start : start + self._expected_batch_size])
                yield from self._micro_batches(loader.collate_fn(loader.dataset.__getitems__(few)))

        if self.budget_is_left():
            sparse.before_step(self.ledger.steps, self.ledger, functools.partial(self._whole, model), examples)
        return sparse.rows

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.compute_loss_context_manager():
            return self.compute_per_example_loss(model, dict(batch))

    def _record(self, model: nn.Module, batch: Batch) -> PerExampleGradients:
        gradients = self._whole(model, batch)
        rows = None if self._sparse is None else self._sparse.rows
        return gradients if rows is None else rows.restricted(gradients)

    def _whole(self, model: nn.Module, batch: Batch) -> PerExampleGradients:
        certificate, rules = self._certificate, self.per_example_rules
        return record(model, self._loss, batch, certificate=certificate, rules=rules, tables=self._tables)

    def _note(self, total: ClippedSum) -> Tensor:
        for name in self._statistics:
            self._statistics[name] += getattr(total, name)
        finite = total.examples - total.non_finite
        mean = total.loss / finite if finite and not self.privacy.withhold_non_private_logs else 0.0
        return torch.tensor(mean, device=self.args.device)

    def budget_is_left(self) -> bool:
        """Whether the promised budget pays for another step."""
        return self.ledger.steps < self._require_plan().budgeted_steps

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Trainer's writes the gradients, times 1, to learn it, and torch has no norm of a sparse tensor.
        return gradient_norm(model) if grad_norm is None else grad_norm

    # --- what Trainer would read from a plain batch ----------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        # A token count over the batch would let one example's length rescale its neighbours.
        return None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As Trainer's, summed over the micro-batches."""
        parts = inputs.get("micro_batches", [inputs])
        if self.privacy.withhold_non_private_logs:
            return 0  # It grows with the drawn batch and its lengths, and is saved in trainer_state.json.
        return sum(int(super(DPTrainerMixin, self).floating_point_ops(part)) for part in parts)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if self.privacy.withhold_non_private_logs:
            return
        # Every call adds up over the ranks, so all must make as many; of a dummy there is nothing to count.
        nothing = [{name: value[:0] for name, value in part.items()} for part in inputs.get("dummies", [])]
        for part in [*inputs.get("micro_batches", [inputs]), *nothing]:
            super()._track_num_input_tokens(part)  # type: ignore[no-untyped-call]

    # --- what comes out -------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, with epsilon and the clipping statistics beside the training loss."""
        if self.is_in_train and ("loss" in logs or "train_loss" in logs):
            plan = self._require_plan()
            logs["epsilon"] = round(self._epsilon(), 4)
            logs["noise_multiplier"] = plan.noise_multiplier
        if self.is_in_train and "loss" in logs:
            seen = self._statistics
            logs["clipped_fraction"] = seen["clipped"] / max(1, seen["examples"])
            logs["non_finite_examples"] = seen["non_finite"]
            if self._attention_noise is not None:
                corrections = self._attention_noise.attention.corrections.take_means()
                logs.update({f"{_CORRECTION}{name}": value for name, value in corrections.items()})
            if self._sparse is not None:
                logs.update({f"{_SPARSE}{name}": value for name, value in self._sparse.take_logs().items()})
            self._statistics = dict.fromkeys(seen, 0)
        if self.privacy.withhold_non_private_logs:
            for name in [name for name in logs if name in _WITHHELD or name.startswith(_CORRECTION)]:
                del logs[name]
        forget_batch_metrics(self)
        super().log(logs, start_time)

    def _epsilon(self) -> float:
        return self.ledger.epsilon(self._accounted_plan().delta, self.privacy.accountant)

    def privacy_report(self) -> accounting.PrivacyReport:
        """What was promised and what was spent so far.

        Raises:
            ConfigurationError: before the first call of `train()`.
        """
        return self._accounted_plan().report(self.ledger)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._attention_noise is not None and self.state.best_model_checkpoint is not None:
            self._attention_noise.load(Path(self.state.best_model_checkpoint))

    def _save_beside(self, directory: Path) -> None:
        if self._plan is not None and self.args.should_save:
            for part in (self._attention_noise, self._sparse):
                if part is not None:
                    part.save(directory)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial spends budget on the same data."""
        raise ConfigurationError(
            "hyperparameter_search on private data.",
            why="every trial is a training of its own, and their epsilons add up; choosing the best one leaks too.",
            fix="search on public data, or train each candidate with its own budget and add up the ledgers.",
        )

    @property
    def _module(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _has_usual_loss(self) -> bool:
        return type(self).compute_per_example_loss is DPTrainerMixin.compute_per_example_loss

    @property
    def _output_dir(self) -> str:
        assert self.args.output_dir is not None
        return self.args.output_dir

    def _accounted_plan(self) -> Plan:
        """Of the latest training that began: a refused one has released nothing."""
        return self._plan if self._plan is not None else self._require_plan()

    def _require_plan(self) -> Plan:
        plan = self._next_plan or self._plan
        if plan is None:
            raise ConfigurationError(
                "there is no privacy plan yet.",
                why="it depends on the number of steps, which train() fixes.",
                fix="call trainer.train() first.",
            )
        return plan


class DPTrainer(DPTrainerMixin, Trainer):
    """Transformers' `Trainer` with a differential-privacy guarantee; see `DPTrainerMixin`."""
