"""Re-Attention: attention corrected for the noise that DP training puts into keys (arXiv:2405.18194)."""

from hf_dp.parts.re_attention.inspection import AttentionByFrequency, inspect_attention
from hf_dp.parts.re_attention.installed import ReAttention, installed, remove_re_attention
from hf_dp.parts.re_attention.loaded import load_re_attention
from hf_dp.parts.re_attention.saved import FILE, FREQUENCIES, read

__all__ = [
    "FILE",
    "FREQUENCIES",
    "AttentionByFrequency",
    "ReAttention",
    "inspect_attention",
    "installed",
    "load_re_attention",
    "read",
    "remove_re_attention",
]
