"""What every private run begins with: data to draw from, ranks that have the same, and a plan with its loader."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers.trainer_utils import seed_worker

import hf_dp.accounting as accounting
import hf_dp.ranks as ranks
from hf_dp.agreement import agree, warn_if_alone
from hf_dp.config import PrivacyConfig
from hf_dp.config.asked import asked, promised
from hf_dp.data.collate import LogicalBatchCollator
from hf_dp.data.loader import PoissonDataLoader, RankSampler
from hf_dp.errors import ConfigurationError
from hf_dp.parts.table import settled
from hf_dp.randomness import Entropy
from hf_dp.sampling.sampler import check_sizes
from hf_dp.sampling.table import sampler_of
from hf_dp.step.plan import Plan
from hf_dp.training.described import described_data, described_model, described_setup
from hf_dp.training.refusals import refuse_dataset


def check_privacy(privacy: object) -> None:
    """Refuses what is no promise (`ConfigurationError`)."""
    if not isinstance(privacy, PrivacyConfig):
        raise ConfigurationError(
            f"privacy={privacy!r}.",
            why="without a PrivacyConfig there is no promise to keep.",
            fix="pass privacy=PrivacyConfig(target_epsilon=8.0).",
        )


def check_data(dataset: Any, expected_batch_size: int, privacy: PrivacyConfig) -> None:
    """Refuses data that cannot be drawn from so, or under this delta (`ConfigurationError`)."""
    refuse_dataset(dataset)
    n = len(dataset)
    check_sizes(n, expected_batch_size, is_secret=privacy.hides_n)
    _sampling(n, expected_batch_size, privacy)
    accounting.promised_delta(privacy, n)


def check_ranks(dataset: Any, model: nn.Module, facts: Mapping[str, Any], accelerator: Any = None) -> None:
    """Refuses ranks that differ, before the model is wrapped, which may overwrite what differs.

    Args:
        facts: the settings of the run, by the names that the error gives them.
        accelerator: whose settings must be the same, where there is one.

    Raises:
        ConfigurationError: with what differs, on all ranks.
    """
    warn_if_alone()
    data = described_data(dataset)
    agree({**facts, **described_setup(accelerator), **data, **described_model(model)})


def planned(
    privacy: PrivacyConfig,
    model: nn.Module,
    dataset: Any,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    *,
    expected_batch_size: int,
    micro_batch_size: int,
    steps: Callable[[PoissonDataLoader], int],
    **options: Any,
) -> tuple[Plan, PoissonDataLoader]:
    """A loader whose items are logical batches, and the plan that goes with its sampler. All ranks call it together.

    Args:
        dataset: the training data, as `check_data` lets it pass.
        collate: the user's data collator.
        micro_batch_size: the most examples that a rank computes at once.
        steps: how many are planned, once there is a loader to ask how long an epoch is.
        options: of `DataLoader`.
    """
    entropy, rank = Entropy.of_all_ranks(privacy.seed), ranks.rank()
    terms = _sampling(len(dataset), expected_batch_size, privacy)
    sampler = sampler_of(terms, len(dataset), entropy, is_secret=privacy.hides_n)
    loader = PoissonDataLoader(
        dataset,
        batch_sampler=RankSampler(sampler, rank, ranks.world_size(), micro_batch_size),
        collate_fn=LogicalBatchCollator(micro_batch_size, collate, reproducible=privacy.seed is not None),
        worker_init_fn=functools.partial(seed_worker, num_workers=options.get("num_workers", 0), rank=rank),
        **options,
    )
    number, promise = int(steps(loader)), settled(privacy, model)
    return Plan.make(promise, sampler, number, entropy, *asked(promise, number)), loader


def _sampling(n: int, expected_batch_size: int, privacy: PrivacyConfig) -> accounting.SamplingTerms:
    return accounting.sampling_terms(n, expected_batch_size, promised(privacy))
