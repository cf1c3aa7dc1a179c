"""What the settings of parts do not go with in a promise. Imports no torch."""

from __future__ import annotations

from typing import Any

from hf_dp.config.output_bias import OutputBiasConfig
from hf_dp.config.part import PartConfig
from hf_dp.config.ranges import shown
from hf_dp.config.re_attention import ReAttentionConfig
from hf_dp.config.sparse_embeddings import SparseEmbeddingConfig
from hf_dp.errors import ConfigurationError

# The field of a promise, and what it may hold.
PARTS: dict[str, type[PartConfig]] = {
    "re_attention": ReAttentionConfig,
    "sparse_embeddings": SparseEmbeddingConfig,
    "output_bias": OutputBiasConfig,
}


def check_parts(promise: Any) -> None:
    """Refuse settings that are none, or that a promise without a budget cannot pay for (`ConfigurationError`);
    `promise` has the config's fields."""
    for name, kind in PARTS.items():
        part = getattr(promise, name)
        if part is not None and not isinstance(part, kind):
            raise ConfigurationError(
                f"{name}={shown(part)}.",
                why="the part follows from its settings.",
                fix=f"give {name}={kind.__name__}().",
            )
    attention, sparse, bias = promise.re_attention, promise.sparse_embeddings, promise.output_bias
    if promise.noise_multiplier is None:
        return
    if attention is not None and attention.token_frequencies == "released":
        raise ConfigurationError(
            "re_attention with released token frequencies, and noise_multiplier in place of target_epsilon.",
            why="the release is paid for with a share of the target epsilon.",
            fix="give target_epsilon, or ReAttentionConfig(token_frequencies='uniform' or 'public').",
        )
    if sparse is not None and sparse.releases_rows:
        raise ConfigurationError(
            "sparse_embeddings with a DP top-k of rows, and noise_multiplier in place of target_epsilon.",
            why="the choice is paid for with a share of the target epsilon.",
            fix="give target_epsilon, or SparseEmbeddingConfig(row_choice='public', ...), or method='adafest'.",
        )
    if bias is not None:
        raise ConfigurationError(
            "output_bias, and noise_multiplier in place of target_epsilon.",
            why="the release is paid for with a share of the target epsilon.",
            fix="give target_epsilon, or leave output_bias out.",
        )
