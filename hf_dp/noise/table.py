"""The one table of sources of noise: kind of the terms -> the source that makes it."""

from __future__ import annotations

from types import MappingProxyType

from hf_dp.accounting import GaussianNoise as NoiseTerms
from hf_dp.noise.chacha20 import ChaCha20Noise
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.noise.grid import GridNoise
from hf_dp.noise.source import NoiseSource
from hf_dp.randomness import Entropy

SOURCES = MappingProxyType[str, type[NoiseSource]](
    {"gaussian": GaussianNoise, "chacha20": ChaCha20Noise, "grid": GridNoise}
)


def source_of(terms: NoiseTerms, entropy: Entropy) -> NoiseSource:
    """The source of these terms (`ConfigurationError` where what it needs is not installed)."""
    return SOURCES[terms.kind](entropy)
