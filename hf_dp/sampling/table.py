"""The one table of samplers: kind of the terms -> the sampler that draws what they say."""

from __future__ import annotations

from types import MappingProxyType

from hf_dp.accounting import SamplingTerms, UnitTerms
from hf_dp.randomness import Entropy
from hf_dp.sampling.poisson import PoissonBatchSampler
from hf_dp.sampling.sampler import BatchSampler
from hf_dp.sampling.truncated import TruncatedPoissonBatchSampler

SAMPLERS = MappingProxyType[str, type[BatchSampler]](
    {"poisson": PoissonBatchSampler, "truncated_poisson": TruncatedPoissonBatchSampler}
)


def sampler_of(
    terms: SamplingTerms,
    dataset_size: int,
    entropy: Entropy,
    *,
    is_secret: bool = False,
    unit: UnitTerms | None = None,
) -> BatchSampler:
    """The sampler of these terms; `is_secret` is whether the dataset's size is, `unit` what is no example."""
    return SAMPLERS[terms.kind](terms, dataset_size, entropy, is_secret=is_secret, unit=unit)
