"""The one table of parts: a new one is a folder, a field of the promise and a line here."""

from __future__ import annotations

from types import MappingProxyType

from torch import nn

from hf_dp.config import PrivacyConfig
from hf_dp.parts.output_bias import OutputBias
from hf_dp.parts.part import Part
from hf_dp.parts.re_attention.part import AttentionNoise
from hf_dp.parts.sparse_embeddings.part import SparseTraining
from hf_dp.parts.token_frequencies import TokenFrequencies

# In the order in which they begin: each may read those before it.
PARTS = MappingProxyType[str, type[Part]](
    {kind.name: kind for kind in (TokenFrequencies, AttentionNoise, SparseTraining, OutputBias)}
)


def parts_of(config: PrivacyConfig) -> dict[str, Part]:
    """New parts, as the promise asks for them."""
    return {name: part for name, kind in PARTS.items() if (part := kind.of(config)) is not None}


def settled(config: PrivacyConfig, model: nn.Module) -> PrivacyConfig:
    """The promise, without what this model makes no use of."""
    for part in parts_of(config).values():
        config = part.settled(config, model)
    return config
