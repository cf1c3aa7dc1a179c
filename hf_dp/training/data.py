"""The part of DPTrainerMixin that reads the training data: the loader, what it must be, and that all ranks have it."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import nn
from transformers.trainer_utils import seed_worker

import hf_dp.accounting as accounting
import hf_dp.ranks as ranks
from hf_dp.agreement import agree, difference, warn_if_alone
from hf_dp.config import PrivacyConfig
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.left_padding import LeftPadding
from hf_dp.data.loader import PoissonDataLoader, RankSampler
from hf_dp.sampling.sampler import BatchSampler, check_sizes
from hf_dp.training.described import (
    described_arguments,
    described_data,
    described_model,
    described_setup,
    described_values,
)
from hf_dp.training.refusals import refuse_dataset

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer
else:
    _Base = object
logger = logging.getLogger(__name__)


class DataMixin(_Base):
    """One item of the training loader is one logical batch; each batch is completed where it is padded on the left."""

    privacy: PrivacyConfig
    _expected_batch_size: int
    _left_padding: LeftPadding
    _sampling: accounting.SamplingTerms

    @property
    def _module(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _dataset(self) -> Any:
        return self.train_dataset

    def _check_dataset(self) -> None:
        refuse_dataset(self._dataset)
        n = len(self._dataset)
        check_sizes(n, self._expected_batch_size)
        self._sampling = accounting.sampling_terms(n, self._expected_batch_size, self.privacy.to_dict())
        accounting.check_delta(self.privacy.target_delta or accounting.default_delta(n), n)

    def _check_ranks(self) -> None:
        """Refuses ranks that differ, before the model is wrapped, which may overwrite what differs."""
        warn_if_alone()
        data, model = described_data(self._dataset), described_model(self._module)
        # Of its factors, `self.args` no longer has the user's gradient_accumulation_steps.
        batch = {"the expected batch size": self._expected_batch_size, "PrivacyConfig": self.privacy.to_dict()}
        agree({**batch, **described_arguments(self.args), **described_setup(self.accelerator), **data, **model})
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and not plugin.cpu_ram_efficient_loading:
            agree(described_values(self._module))
        elif plugin is None and (found := difference(described_values(self._module))) is not None:
            ranks.warn(logger, "%s; DDP replaces them by rank 0's.", found)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The expected logical batch size."""
        return self._expected_batch_size

    def _make_loader(self, sampler: BatchSampler) -> PoissonDataLoader:
        dataset, collate = self._dataset, self.data_collator
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

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As Trainer's, in training and in evaluation; what is padded on the left is completed."""
        return self._left_padding.completed(self._module, super()._prepare_inputs(inputs))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; none after the last step, where Trainer resumed from its checkpoint would make one more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(*args, **kwargs)
