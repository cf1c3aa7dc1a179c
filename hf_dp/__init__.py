"""Differentially private fine-tuning of Hugging Face models.

Every public name is loaded when it is first used (PEP 562): `import hf_dp` alone imports neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dp import accounting, losses, per_example
    from hf_dp.accounting import PrivacyReport
    from hf_dp.config import PrivacyConfig, ReAttentionConfig, SparseEmbeddingConfig
    from hf_dp.hub import load_report
    from hf_dp.parts.re_attention import load_re_attention, remove_re_attention
    from hf_dp.training.trainer import DPTrainer, DPTrainerMixin

    __version__: str

__all__ = [
    "DPTrainer",
    "DPTrainerMixin",
    "PrivacyConfig",
    "PrivacyReport",
    "ReAttentionConfig",
    "SparseEmbeddingConfig",
    "__version__",
    "accounting",
    "load_re_attention",
    "load_report",
    "losses",
    "per_example",
    "remove_re_attention",
]

_HOME = {
    "DPTrainer": "hf_dp.training.trainer",
    "DPTrainerMixin": "hf_dp.training.trainer",
    "PrivacyConfig": "hf_dp.config",
    "PrivacyReport": "hf_dp.accounting",
    "ReAttentionConfig": "hf_dp.config",
    "SparseEmbeddingConfig": "hf_dp.config",
    "load_re_attention": "hf_dp.parts.re_attention",
    "load_report": "hf_dp.hub",
    "remove_re_attention": "hf_dp.parts.re_attention",
}
_MODULES = {"accounting", "losses", "per_example"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")  # the import itself sets the attribute
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    try:
        return importlib.metadata.version("hf-dp")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path, never installed
        return "0+uninstalled"
