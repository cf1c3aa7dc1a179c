"""DPTrainer: Transformers' Trainer with a private training step. Nothing of Trainer's loop is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import EvalPrediction

import hf_dp.accounting as accounting
import hf_dp.ranks as ranks
from hf_dp.config import PrivacyConfig
from hf_dp.data.cut import check_max_tokens
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.loader import PoissonDataLoader
from hf_dp.errors import ConfigurationError
from hf_dp.parts.part import Setting
from hf_dp.parts.table import parts_of
from hf_dp.per_example import RULES, Rule
from hf_dp.per_example.batch import Batch
from hf_dp.per_example.checks.preflight import check_modules
from hf_dp.training.behind.table import behind
from hf_dp.training.callbacks import PrivacyCallback
from hf_dp.training.data import DataMixin
from hf_dp.training.engine import Engine
from hf_dp.training.evaluation_tried import TriedEvaluationMixin
from hf_dp.training.logs import LogsMixin
from hf_dp.training.loop_order import DrawOrder, same_model
from hf_dp.training.planned import check_data, check_privacy, records_before
from hf_dp.training.publishing import PublishingMixin
from hf_dp.training.refusals import private_arguments, refuse_optimizer, refuse_overrides, refuse_parallel_model
from hf_dp.training.resuming.checkpoints import CheckpointMixin, others_named
from hf_dp.training.resuming.layouts import LayoutsMixin
from hf_dp.training.resuming.loaded import refuse_other_values
from hf_dp.training.resuming.output_lock import alone_in, warn_of_others
from hf_dp.training.resuming.restoring import RestoringMixin, refuse_half
from hf_dp.training.resuming.resume import Fingerprints, SavedRun, note_trained_by
from hf_dp.training.run import Run
from hf_dp.training.signature import all_given, tell


class DPTrainerMixin(
    RestoringMixin, CheckpointMixin, LayoutsMixin, PublishingMixin, DataMixin, TriedEvaluationMixin, LogsMixin
):
    """Makes any Trainer subclass train with DP-SGD: `class MyTrainer(DPTrainerMixin, MyBaseTrainer)`.

    One dataloader item is one logical batch, Poisson-sampled with expected size `per_device_train_batch_size` x
    `gradient_accumulation_steps` x processes, by which sums are divided (with a `sampling_probability` of your own the
    batches may be of another mean size); `per_device_train_batch_size` is the micro-batch. In the trainer's own
    copy of the arguments `gradient_accumulation_steps` is 1 and `max_grad_norm` is 0; yours are left alone.

    Args:
        privacy: the promise.
        max_tokens_per_micro_batch: the most tokens of a micro-batch, padding included, that has more than one row; so
            a long row does not decide the memory. No part of the promise. None: rows alone are counted.
        args, kwargs: those of the Trainer behind this class. `help` and notebooks show them by name; types of Python
            cannot say it, so that type checkers ask for `privacy`, and let any others pass.

    Raises:
        ConfigurationError: arguments, data or overrides that would break the guarantee.
        UnsupportedModelError: a model that cannot be trained privately.
    """

    #: How operations use their parameters. Extend it for operations of your own; see docs/rules.md.
    per_example_rules: Mapping[Any, Rule] = RULES

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tell(cls, DPTrainerMixin)

    @all_given
    def __init__(
        self, *args: Any, privacy: PrivacyConfig, max_tokens_per_micro_batch: int | None = None, **kwargs: Any
    ) -> None:
        check_privacy(privacy)
        check_max_tokens(max_tokens_per_micro_batch)
        self.privacy, self.max_tokens_per_micro_batch = privacy, max_tokens_per_micro_batch
        self._earlier: tuple[str, ...] = ()
        self.ledger = accounting.Ledger()
        self._run: Run | None = None
        self._left_padding = LeftPadding(self._has_usual_loss)
        self._saved_run: SavedRun | None = None
        self._checkpoint: Path | None = None
        self._fingerprints, self._preparing = Fingerprints(), WeakKeyDictionary()
        self._behind = behind(self)
        with ranks.before_together(), self._behind.making(*args, **kwargs):
            self._earlier, self._read_for = records_before(privacy), privacy
            super().__init__(*args, **kwargs)
        self._privacy_callback = PrivacyCallback(self)
        self.add_callback(self._privacy_callback)
        self._behind.forget_batch_metrics()  # where it cannot, that is refused now

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; refuses an output directory where another is at work. If a rank fails, the others say why."""
        with ranks.together(), alone_in(self._output_dir):
            try:
                return super().train(*args, **kwargs)
            except BaseException as error:
                self._privacy_callback.on_interruption(error)
                raise
            finally:
                self.is_in_train = False
                if self._run is not None:
                    self._run.end()

    # --- before training ------------------------------------------------------------------------------------------

    def _validate_args(self) -> None:
        args = self.args
        self._behind.refuse(own_loss=not self._has_usual_loss)
        self.args = private_arguments(args, self.privacy)
        self._expected_batch_size = args.train_batch_size * args.gradient_accumulation_steps * ranks.world_size()
        refuse_overrides(self, DPTrainerMixin, Trainer)
        refuse_parallel_model(self, self._module)
        for part in parts_of(self.privacy).values():
            part.refuse(Setting(self.privacy, is_sharded=self.is_fsdp_enabled))
        if self.train_dataset is not None:
            check_data(self._dataset, self._expected_batch_size, self.privacy, self._earlier)
            check_modules(self._module)
            if self._has_usual_loss:
                self._behind.refuse_unknown_loss()
            refuse_optimizer(self.optimizer, self._module)
        super()._validate_args()

    def get_train_dataloader(self) -> PoissonDataLoader:
        """A loader whose items are logical batches, and the plan that goes with its sampler."""
        if self.train_dataset is None:
            raise ConfigurationError(
                "DPTrainer has no train_dataset.", why="there is nothing to train on.", fix="pass train_dataset=..."
            )
        if self.privacy is not self._read_for:
            self._earlier, self._read_for = records_before(self.privacy), self.privacy
        check_data(self._dataset, self._expected_batch_size, self.privacy, self._earlier)
        self._fingerprints = Fingerprints()  # of this data, which may not be that of the training before
        self._check_ranks()
        plan, loader = self._planned()
        engine = Engine(
            *(self._module, self._loss, loader, self._prepare_examples, self._left_padding),
            *(self.per_example_rules, self._behind.check_losses if self._has_usual_loss else None),
            own=self._own_preparation(),
        )
        engine.is_silent = bool(self.args.disable_tqdm)
        self._run, self._draws = Run(plan, engine, self._run, self.processing_class), DrawOrder()
        return loader

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As Trainer's; parts of the training may put another optimizer beside it."""

        def make() -> torch.optim.Optimizer:
            super(DPTrainerMixin, self).create_optimizer(model)
            assert self.optimizer is not None
            return self.optimizer

        if self._run is None:
            return make()
        self.optimizer = self._run.make_optimizer(make, self.optimizer, self.args.weight_decay)
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
        # Until a training with its ledger has begun: a refused one has read the weights too.
        note_trained_by(self._module, self._saved_run, self._saved_run.ledger)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def begin_private_run(self, state: TrainerState) -> None:
        """Continues the ledger of a checkpoint, or begins one; then holds the engine against the oracle.

        Raises:
            LedgerError: a checkpoint with a ledger for other data, config or length.
            BudgetExceededError: the budget was already spent.
            UnsupportedModelError: per-example gradients of this model are not known to be exact.
        """
        run, saved, self._saved_run = self._require_run(), self._saved_run, None
        assert saved is not None or not state.global_step, "steps were taken before, but no checkpoint was read"
        assert self.optimizer is not None
        run.engine.model = self._module
        checkpoint = None if saved is None else self._checkpoint
        with others_named(checkpoint, lambda other: SavedRun.read(other).check(run.plan.promise, self._dataset)):
            anew = saved is None and not self.ledger.steps
            self.ledger = run.go_on(self.ledger, saved, self._dataset, self, self._behind.beside())
        if anew:
            warn_of_others(self._output_dir, self.privacy)
        if saved is not None:
            refuse_other_values(self._checkpoint, saved.values, self._module, self.optimizer)
            if self.args.load_best_model_at_end:
                self.read_best(run.plan.promise, self._dataset)
        self._try_evaluation()
        run.begin(self.optimizer, checkpoint, state.global_step, owner=self)

    def after_optimizer_step(self) -> None:
        """Looks at what the optimizer did."""
        assert self._begun is not None
        assert self.optimizer is not None
        self._begun.after_optimizer_step(self.optimizer)

    def checkpoint_record(self) -> dict[str, Any]:
        """What a checkpoint keeps: the ledger, and a keyed fingerprint of the data."""
        saved = self._fingerprints.saved(
            self.ledger, self.train_dataset, self._output_dir, self._values_to_save, self.privacy.unit
        )
        return saved.record(dataclasses.asdict(self.state))

    # --- one step -------------------------------------------------------------------------------------------------

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of each example of one micro-batch by itself. Override it for a loss of your own.

        Args:
            model: the model, unwrapped.
            inputs: what the data collator returned, on the model's device: tensors (B, ...).

        Returns:
            (B,): entry i must depend on example i alone.
        """
        return self._behind.losses(model, inputs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One private gradient from one logical batch; returns the mean loss of its examples (not private)."""
        run = self._begun
        if self._privacy_callback not in self.callback_handler.callbacks or run is None:
            raise ConfigurationError(
                "PrivacyCallback was removed, or training_step was called outside train().",
                why="it keeps the ledger in the checkpoints and stops training at the end of the budget.",
                fix="leave the callback in place, and train with DPTrainer.train().",
            )
        self._refuse_changed(run.loader)
        model.train()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        run.engine.model = same_model(self.accelerator.unwrap_model(model), self._module)
        mean = run.step(self._draws.used(inputs)).mean_loss
        return torch.tensor(0.0 if self._withholds_logs else mean, device=self.args.device)

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.compute_loss_context_manager():
            return self.compute_per_example_loss(model, dict(batch))

    def budget_is_left(self) -> bool:
        """Whether the promised budget pays for another step."""
        return self._begun is not None and self._begun.budget_is_left

    def _load_best_model(self) -> None:
        assert self._begun is not None
        if (saved := self.read_best(self.ledger.promise, self._dataset)) is None:
            return
        super()._load_best_model()
        best = Path(str(self.state.best_model_checkpoint))
        refuse_other_values(best, saved.values, self._module)
        for part in self._begun.parts.values():
            part.load(best)

    @property
    def _has_usual_loss(self) -> bool:
        return type(self).compute_per_example_loss is DPTrainerMixin.compute_per_example_loss

    @property
    def _output_dir(self) -> str:
        assert self.args.output_dir is not None
        return self.args.output_dir


class DPTrainer(DPTrainerMixin, Trainer):
    """Transformers' `Trainer` with a differential-privacy guarantee; see `DPTrainerMixin`."""

    if TYPE_CHECKING:  # what `tell` says of it to `inspect`, for who reads no more than the source

        def __init__(
            self,
            model: nn.Module | None = None,
            args: TrainingArguments | None = None,
            data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
            train_dataset: Any = None,
            eval_dataset: Any = None,
            processing_class: Any = None,
            model_init: Callable[..., nn.Module] | None = None,
            compute_loss_func: Callable[..., Tensor] | None = None,
            compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
            callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
            optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
            optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
            preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
            *,
            privacy: PrivacyConfig,
            max_tokens_per_micro_batch: int | None = None,
        ) -> None: ...
