"""Coins for whole micro-batches that are known by name are switched off; those of each row stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import loop, preflight, record
from hf_dp.per_example.checks.switches import switch_off
from tests.per_example.small import Small, batch, square
from tests.zoo import text_batch, tiny


class StochasticDepth(nn.Module):
    """As torchvision's."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        size = [1 if self.mode == "batch" else len(x), *[1] * (x.dim() - 1)]
        if not self.training:
            return x
        return x * torch.empty(size, dtype=x.dtype).bernoulli_(0.8) / 0.8


@pytest.mark.slow
def test_failure_28_stochastic_depth_is_of_rows_or_refused_with_its_name() -> None:
    def model(mode: str) -> nn.Module:
        return Small(lambda m, x: x + m.depth(m.linear(x).cos()), linear=nn.Linear(4, 4), depth=StochasticDepth(mode))

    preflight(model("row"), square, batch(3, 5, 4))
    with pytest.raises(PreflightError, match=r"bernoulli_ of shape \(1, 1, 1\) in depth"):
        preflight(model("batch"), square, batch(3, 5, 4))


def test_dropout_with_one_mask_for_all_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """DeBERTa's relative positions, of which there is one table for all examples."""
    model = tiny("deberta-v2", "sequence", torch.float32, num_hidden_layers=1, hidden_dropout_prob=0.1)
    preflight(model, per_example_losses, text_batch("sequence", dtype=torch.float32))
    attention = model.deberta.encoder.layer[0].attention
    assert (attention.self.pos_dropout.p, attention.output.dropout.p) == (0.0, 0.1)
    assert "pos_dropout.p=0.1" in caplog.text
    assert ".output.dropout" not in caplog.text


@pytest.mark.parametrize(
    ("name", "head", "switches"),
    [
        ("m2m_100", "seq2seq", {"encoder_layerdrop": 0.05, "encoder_layers": 1, "decoder_layers": 1}),
        ("opt", "causal_lm", {"layerdrop": 0.9}),
        ("wav2vec2", "ctc", {"layerdrop": 0.1, "apply_spec_augment": True, "mask_time_length": 2}),
    ],
)
@pytest.mark.slow
def test_failure_28_layer_drop_and_spec_augment_are_switched_off(
    name: str, head: str, switches: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, data = tiny(name, head, **switches), text_batch(head)
    certificate = preflight(model, per_example_losses, data)
    found = record(model, per_example_losses, data, certificate=certificate)
    truth = loop(model, per_example_losses, data)
    assert torch.allclose(found.squared_norms(), truth.squared_norms(), rtol=1e-10)
    assert caplog.text.count("Switched off for private training") == 1
    assert "layerdrop=" in caplog.text
    assert switch_off(model) == []


def test_spec_augment_without_a_switch_is_switched_off_by_its_probabilities() -> None:
    model = Small(lambda m, x: m.linear(x).cos(), linear=nn.Linear(4, 4))
    model.config = type("Config", (), {})()
    model.config.mask_time_prob, model.config.layerdrop, model.config.speech_encoder_layerdrop = 0.05, 0, 0.2
    assert switch_off(model) == ["speech_encoder_layerdrop=0.2", "mask_time_prob=0.05"]
    assert vars(model.config) == {"mask_time_prob": 0.0, "layerdrop": 0, "speech_encoder_layerdrop": 0.0}


@pytest.mark.parametrize(
    ("jitter", "dtype"),
    [
        (1e-4, torch.float64),
        (1e-2, torch.float32),
        (1e-4, torch.float32),
        (1e-2, torch.float64),
    ],
)
@pytest.mark.slow
def test_jitter_for_each_row_is_not_mixing(jitter: float, dtype: torch.dtype) -> None:
    model = tiny("mixtral, experts batched", "causal_lm", dtype, router_jitter_noise=jitter)
    preflight(model, per_example_losses, text_batch("causal_lm"))
