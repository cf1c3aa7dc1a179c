"""Rows are followed through all modules where that is needed alone: it takes as long as the step."""

from __future__ import annotations

import pytest
import torch

from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight
from tests.zoo import text_batch, tiny


@pytest.mark.parametrize(
    ("name", "head", "is_followed"),
    [
        *((name, "causal_lm", False) for name in ("gpt2", "llama", "qwen2", "gemma2", "opt")),
        *((name, "sequence", False) for name in ("bert", "gpt2", "llama")),
        *((name, "token", False) for name in ("bert", "distilbert")),
        ("t5", "seq2seq", False),
        ("bert", "qa", False),
    ],
)
def test_common_models_are_not_followed_in_each_step(name: str, head: str, is_followed: bool) -> None:
    model, batch = tiny(name, head), text_batch(head, 5, 6)
    certificate = preflight(model, lambda m, b: per_example_losses(m, b).to(torch.float64), batch)
    assert (("rows", "", 0) in certificate.readings) == is_followed
