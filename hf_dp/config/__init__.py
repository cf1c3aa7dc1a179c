"""What the user promises: frozen, to JSON and back; no torch."""

from hf_dp.config.fields import AccountantName
from hf_dp.config.output_bias import OutputBiasConfig
from hf_dp.config.promise import PrivacyConfig
from hf_dp.config.re_attention import ReAttentionConfig
from hf_dp.config.sparse_embeddings import SparseEmbeddingConfig

__all__ = ["AccountantName", "OutputBiasConfig", "PrivacyConfig", "ReAttentionConfig", "SparseEmbeddingConfig"]
