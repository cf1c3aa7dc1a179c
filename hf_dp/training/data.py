"""The part of DPTrainerMixin that reads the training data: the loader, what it must be, and that all ranks have it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from datasets import Dataset
from torch import nn

import hf_dp.ranks as ranks
from hf_dp.agreement import agree, difference
from hf_dp.config import PrivacyConfig
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.loader import PoissonDataLoader
from hf_dp.data.moving import moved
from hf_dp.step.plan import Plan
from hf_dp.training.base import TrainerBehind
from hf_dp.training.behind.usual import Usual
from hf_dp.training.described import described_arguments, described_values
from hf_dp.training.planned import check_ranks, planned, rows_and_units
from hf_dp.training.refusals import (
    refuse_changed_arguments,
    refuse_choices_by_training_data,
    refuse_told_of_training_data,
)
from hf_dp.training.refusals.arguments import refuse_changed_steps
from hf_dp.training.refusals.overrides import Preparing, refuse_methods_of_its_own

logger = logging.getLogger(__name__)
_KNOWN = ("hf_dp.", "transformers.", "trl.")


def _is_known(module: str, method: Any) -> bool:
    # A wrapper may have the module of what it wraps, and a class of Transformers a method of one's own.
    return all(str(name).startswith(_KNOWN) for name in (module, getattr(method, "__module__", "")))


class DataMixin(TrainerBehind):
    """One item of the training loader is one logical batch; each batch is completed where it is padded on the left."""

    privacy: PrivacyConfig
    _earlier: tuple[str, ...]
    _preparing: WeakKeyDictionary[PoissonDataLoader, Preparing]
    max_tokens_per_micro_batch: int | None
    _behind: Usual
    _expected_batch_size: int
    _left_padding: LeftPadding

    @property
    def _module(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _dataset(self) -> Any:
        return self.train_dataset

    def _check_ranks(self) -> None:
        # Of its factors, `self.args` no longer has the user's gradient_accumulation_steps.
        batch = {
            "the expected batch size": self._expected_batch_size,
            "max_tokens_per_micro_batch": self.max_tokens_per_micro_batch,
            "PrivacyConfig": self.privacy.to_dict(),
        }
        check_ranks(self._dataset, self._module, {**batch, **described_arguments(self.args)}, self.accelerator)
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and not plugin.cpu_ram_efficient_loading:
            agree(described_values(self._module))
        elif plugin is None and (found := difference(described_values(self._module))) is not None:
            ranks.warn(logger, "%s; DDP replaces them by rank 0's.", found)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected logical batch size."""
        return self._expected_batch_size

    def _planned(self) -> tuple[Plan, PoissonDataLoader]:
        """Of the next training, whose number of steps Trainer reads off the loader."""
        refuse_methods_of_its_own(self)
        refuse_changed_arguments(self.args, self.privacy)
        refuse_choices_by_training_data(self)
        refuse_told_of_training_data(self)
        collate = self._behind.collator(self.data_collator)
        dataset, units = rows_and_units(self._dataset, self.privacy)
        if isinstance(dataset, Dataset):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        plan, loader = planned(
            self.privacy,
            self._module,
            dataset,
            collate,
            expected_batch_size=self._expected_batch_size,
            micro_batch_size=self.args.per_device_train_batch_size,
            units=units,
            max_tokens_per_micro_batch=self.max_tokens_per_micro_batch,
            earlier=self._earlier,
            steps=lambda loader: self.set_initial_training_values(self.args, loader)[-1],
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )
        self._preparing[loader] = Preparing(self, loader)
        return plan, loader

    def _remove_unused_columns(self, dataset: Dataset, description: str | None = None) -> Dataset:
        """As Trainer's; of rows of evaluation too no model sees whose they are, unless a transform reads it."""
        if (unit := self.privacy.unit) in dataset.column_names and dataset.format["type"] != "custom":
            dataset = dataset.remove_columns([str(unit)])
        left: Dataset = super()._remove_unused_columns(dataset, description=description)
        return left

    def _refuse_changed(self, loader: PoissonDataLoader) -> None:
        """What a callback may have changed since the training began, and a step must not be made with."""
        refuse_changed_steps(self.args)
        self._preparing[loader].refuse_another(self, loader)

    def num_examples(self, dataloader: Any) -> int:
        """As Trainer's, from which a rate in its log follows; of training data n, which counts units, not rows."""
        if isinstance(dataloader, PoissonDataLoader):
            return round(dataloader.public_size)
        return super().num_examples(dataloader)

    def _prepare_input(self, data: Any) -> Any:
        """As Trainer's, without waiting for a GPU."""
        return super()._prepare_input(moved(data, self.args.device) if isinstance(data, torch.Tensor) else data)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As Trainer's, in training and in evaluation; what is padded on the left is completed."""
        return self._left_padding.completed(self._module, super()._prepare_inputs(inputs), inputs)

    def _prepare_examples(self, inputs: Any) -> Any:
        """`_prepare_inputs` of a micro-batch of training."""
        return self._behind.prepared(self._module, self._prepare_inputs(inputs))

    def _own_preparation(self) -> tuple[str, Callable[[Any], Any], Callable[[Any], Any]] | None:
        """What a user's class does to batches in place of Trainer, if it does; see `Engine`."""
        methods = "_prepare_inputs", "_prepare_input"
        # Those of a Trainer behind this class too, which are called from here, and what was put in their place.
        places = [(type(self).__name__, "", vars(self))]
        places += [(kind.__name__, kind.__module__, dict(vars(kind))) for kind in type(self).__mro__]
        own = [
            f"{place}.{name}"
            for name in methods
            for place, module, held in places
            if name in held and not _is_known(module, held[name])
        ]
        return (own[0], self._prepare_inputs, lambda batch: self._behind.prepared(self._module, batch)) if own else None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; none after the last step, where Trainer resumed from its checkpoint would make one more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)
