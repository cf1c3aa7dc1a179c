"""Models that Re-Attention corrects for noise in every parameter, and how far two results are apart."""

from __future__ import annotations

from typing import Any

import torch
import transformers.models.gptj.modeling_gptj as gptj
from torch import nn

from hf_dp import ReAttentionConfig
from hf_dp.parts.re_attention import ReAttention
from hf_dp.parts.re_attention.deviations import one_step, relative_counts
from tests.architectures import VOCABULARY

# GPT-J attends through Transformers' interface from 5.24 on.
NEWER = ("gptj",) if hasattr(gptj, "ALL_ATTENTION_FUNCTIONS") else ()
FAMILIES = {
    **dict.fromkeys(("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), "causal_lm"),
    **dict.fromkeys(("phi3", "llama_tied", "cohere", *NEWER), "causal_lm"),
    **dict.fromkeys(("bert", "roberta", "distilbert", "modernbert"), "sequence"),
    "t5": "seq2seq",
    "vit": "image",
}
FIDELITIES = ("isotropic", "per_feature")


def config(fidelity: Any = "isotropic", scale: float = 1.0) -> ReAttentionConfig:
    return ReAttentionConfig(fidelity=fidelity, token_frequencies="uniform", scale=scale)


def noisy(model: nn.Module, fidelity: str = "isotropic", deviation: float = 0.05) -> ReAttention:
    """Re-Attention with more noise in rare tokens."""
    attention = ReAttention(model, config(fidelity))
    counts = relative_counts(model, 8.0, torch.linspace(0.01, 1.0, VOCABULARY))
    attention.errors = one_step(counts, deviation)
    return attention


def off_by(found: Any, truth: Any) -> float:
    """Norms relative to themselves, and the sum relative to its length over all parameters."""
    ones = torch.ones(truth.batch_size, dtype=torch.float64)
    ours, sums = found.weighted_sum(ones), truth.weighted_sum(ones)
    whole = sum(float(v.square().sum()) for v in sums.values()) ** 0.5
    norms = (found.squared_norms() - truth.squared_norms()).abs() / truth.squared_norms()
    return max(float(norms.max()), *(float((ours[k] - v).norm()) / whole for k, v in sums.items()))


# What is written once for each fidelity is tried on a few families; the others have the default.
OF_EACH_FIDELITY = {"gemma2"}
USUAL = OF_EACH_FIDELITY | {"gpt2", "bert", "vit"}
