"""What the user promises: frozen, to JSON and back; no torch."""

from hf_dp.config.promise import AccountantName, PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig

__all__ = ["AccountantName", "PrivacyConfig", "ReAttentionConfig", "SparseEmbeddingConfig"]
