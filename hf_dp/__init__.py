"""Differentially private fine-tuning of Hugging Face models.

Every public name is loaded when it is first used (PEP 562): `import hf_dp` alone imports neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dp import accounting, audit, losses, per_example
    from hf_dp.accounting import PrivacyReport
    from hf_dp.config import OutputBiasConfig, PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
    from hf_dp.hub import load_report
    from hf_dp.parts.re_attention import load_re_attention, remove_re_attention
    from hf_dp.per_example.still import still_batch_norm
    from hf_dp.training.private_run import PrivateRun
    from hf_dp.training.trainer import DPTrainer, DPTrainerMixin

# In every record: it changes when another epsilon is computed from the same ledger, too.
__version__ = "0.3.0"

__all__ = [
    "DPTrainer",
    "DPTrainerMixin",
    "OutputBiasConfig",
    "PrivacyConfig",
    "PrivacyReport",
    "PrivateRun",
    "ReAttentionConfig",
    "SparseEmbeddingConfig",
    "__version__",
    "accounting",
    "audit",
    "load_re_attention",
    "load_report",
    "losses",
    "per_example",
    "remove_re_attention",
    "still_batch_norm",
]

_HOME = {
    "DPTrainer": "hf_dp.training.trainer",
    "DPTrainerMixin": "hf_dp.training.trainer",
    "OutputBiasConfig": "hf_dp.config",
    "PrivacyConfig": "hf_dp.config",
    "PrivacyReport": "hf_dp.accounting",
    "PrivateRun": "hf_dp.training.private_run",
    "ReAttentionConfig": "hf_dp.config",
    "SparseEmbeddingConfig": "hf_dp.config",
    "load_re_attention": "hf_dp.parts.re_attention",
    "load_report": "hf_dp.hub",
    "remove_re_attention": "hf_dp.parts.re_attention",
    "still_batch_norm": "hf_dp.per_example.still",
}
_MODULES = {"accounting", "audit", "losses", "per_example"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")  # the import itself sets the attribute
    if name in _HOME:
        value: Any = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
