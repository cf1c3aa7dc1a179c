"""Truncated Poisson sampling: no logical batch is larger than a cap."""

from __future__ import annotations

from hf_dp.accounting import TruncatedPoissonSampling
from hf_dp.randomness import bernoulli
from hf_dp.sampling.sampler import BatchSampler


class TruncatedPoissonBatchSampler(BatchSampler):
    """Draws as `PoissonBatchSampler`, and of more than B examples keeps B, each subset of them as likely (Ganesh 2025,
    arXiv:2508.15089).

    So no step has more than ceil(B / micro-batch size) micro-batches on one rank. What it costs beside Poisson sampling
    follows from how often others fill the batch: `hf_dp.accounting.truncated`. Sums are divided by the expected size of
    the draw, as those of Poisson sampling: by the number that was kept would let each example change the divisor.
    """

    terms: TruncatedPoissonSampling

    def draw(self, step: int) -> list[int]:
        generator, most = self._entropy.generator("sampling", step), self.terms.max_batch_size
        drawn = bernoulli(generator, self.dataset_size, self.terms.probability)
        if len(drawn) <= most:
            return drawn
        return [drawn[place] for place in sorted(generator.choice(len(drawn), most, replace=False))]
