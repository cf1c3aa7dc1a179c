"""Poisson sampling: one logical batch per step, possibly empty, in time and memory of the batch, not of the data."""

from __future__ import annotations

from hf_dp.accounting import PoissonSampling
from hf_dp.randomness import Entropy, bernoulli
from hf_dp.sampling.sampler import BatchSampler, check_sizes


class PoissonBatchSampler(BatchSampler):
    """At every step each of n examples is drawn independently with probability q.

    Batches vary in size and may be empty; an empty batch is a step like any other.

    Source: see `hf_dp.randomness.bernoulli`.
    """

    @classmethod
    def of(
        cls, dataset_size: int, expected_batch_size: int, entropy: Entropy, steps_per_epoch: int | None = None
    ) -> PoissonBatchSampler:
        """With q = expected batch size / n."""
        check_sizes(dataset_size, expected_batch_size, steps_per_epoch)
        q = expected_batch_size / dataset_size
        terms = PoissonSampling(probability=q, expected_batch_size=expected_batch_size)
        return cls(terms, dataset_size, entropy, steps_per_epoch)

    def draw(self, step: int) -> list[int]:
        return bernoulli(self._entropy.generator("sampling", step), self.dataset_size, self.terms.probability)
