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
        cls,
        dataset_size: int,
        expected_batch_size: int,
        entropy: Entropy,
        steps_per_epoch: int | None = None,
        sampling_probability: float | None = None,
    ) -> PoissonBatchSampler:
        """With q = expected batch size / n, and n public; or with a q of its own, and n secret."""
        is_secret = sampling_probability is not None
        check_sizes(dataset_size, expected_batch_size, steps_per_epoch, is_secret=is_secret)
        q = expected_batch_size / dataset_size if sampling_probability is None else sampling_probability
        terms = PoissonSampling(probability=q, expected_batch_size=expected_batch_size)
        return cls(terms, dataset_size, entropy, steps_per_epoch, is_secret=is_secret)

    def draw(self, step: int) -> list[int]:
        return bernoulli(self._entropy.generator("sampling", step), self.dataset_size, self.terms.probability)
