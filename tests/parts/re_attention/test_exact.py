"""Re-Attention on every family: off, it is plain attention; on, per-example gradients stay exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_dp.parts.re_attention.attention as implementation
from hf_dp import remove_re_attention
from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.parts.re_attention import ReAttention, inspect_attention
from hf_dp.parts.re_attention.moments import Moments
from hf_dp.per_example import preflight, record
from hf_dp.per_example.oracle import loop
from tests.architectures import VOCABULARY
from tests.parts.re_attention.noisy import FAMILIES, FIDELITIES, NEWER, OF_EACH_FIDELITY, USUAL, config, noisy, off_by
from tests.zoo import text_batch, tiny, with_dropout


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "fidelity"),
    [
        pytest.param(
            family, fidelity, marks=[] if family in (USUAL if usual else OF_EACH_FIDELITY) else pytest.mark.slow
        )
        for family in FAMILIES
        for fidelity, usual in zip(FIDELITIES, (True, False), strict=True)
    ],
)
def test_off_it_is_plain_attention_and_on_it_is_exact(family: str, fidelity: str) -> None:
    model, data = tiny(family, FAMILIES[family]), text_batch(FAMILIES[family])
    plain = model(**data).logits
    attention = ReAttention(model, config(fidelity))
    assert torch.equal(model(**data).logits, plain)
    attention = noisy(model, fidelity)
    assert not torch.allclose(model(**data).logits, plain, rtol=1e-9, atol=0)
    corrections = attention.corrections.take_means()
    assert set(corrections) == set(attention.layers.values())
    assert all(value > 0 for value in corrections.values())
    certificate = preflight(model, per_example_losses, data)
    found = record(model, per_example_losses, data, certificate=certificate)
    assert off_by(found, loop(model, per_example_losses, data)) <= 1e-12
    remove_re_attention(model)
    assert torch.equal(model(**data).logits, plain)


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "t5"])
def test_features_for_a_gpus_kernels_change_nothing(family: str, fidelity: str, monkeypatch: Any) -> None:
    model, data = tiny(family, FAMILIES[family]), text_batch(FAMILIES[family])
    noisy(model, fidelity)
    expected = model(**data).logits
    monkeypatch.setattr(implementation, "_spare", lambda features, device: 8 + -features % 8)
    torch.testing.assert_close(model(**data).logits, expected, rtol=1e-12, atol=1e-12)


def test_a_gpus_kernels_get_whole_eights() -> None:
    assert [implementation._spare(width, torch.device("cuda")) for width in (64, 65, 72, 257)] == [0, 7, 0, 7]
    assert implementation._spare(65, torch.device("cpu")) == 0


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"t5", "vit"}))  # but for biases of positions, and patches
def test_one_variance_for_each_token_is_never_written_out_for_each_feature(family: str, monkeypatch: Any) -> None:
    """As wide as the activations, it would cost as much as they do."""
    model, kept = tiny(family, FAMILIES[family]), []
    put = Moments.put

    def watched(self: Moments, tensor: Tensor, tracked: Any) -> None:
        kept.extend([] if tracked is None else [tracked.variance.own, tracked.variance.shared])
        put(self, tensor, tracked)

    monkeypatch.setattr(Moments, "put", watched)
    noisy(model)
    model(**text_batch(FAMILIES[family]))
    wide = [v for v in kept if v is not None and v.dim() and v.shape[-1] > 1]
    assert len(wide) > 10
    assert all(v.stride(-1) == 0 for v in wide)


@pytest.mark.parametrize("family", sorted({"bloom", "gptj", "falcon", "gpt_neo", "deberta-v2", "albert"} - {*NEWER}))
def test_a_family_that_does_not_dispatch_is_refused(family: str) -> None:
    head = "sequence" if family in ("deberta-v2", "albert") else "causal_lm"
    model, data = tiny(family, head), text_batch(head)
    noisy(model)
    with pytest.raises(UnsupportedModelError, match=r"attention interface|attends twice"):
        model(**data)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.slow
def test_gradient_checkpointing_attends_the_same_again(fidelity: str, reentrant: bool) -> None:
    model, data = tiny("llama", "causal_lm"), text_batch("causal_lm")
    noisy(model, fidelity)
    plain = record(model, per_example_losses, data)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert off_by(record(model, per_example_losses, data), plain) <= 1e-12


def test_dropout_draws_the_same_masks_in_norm_and_sum() -> None:
    model, data = with_dropout(tiny("gpt2", "causal_lm")), text_batch("causal_lm")
    noisy(model)
    torch.manual_seed(3)
    found = record(model, per_example_losses, data)
    total = found.weighted_sum(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    norm = sum(float(v.square().sum()) for v in total.values())
    assert norm == pytest.approx(float(found.squared_norms()[1]), rel=1e-12)


def test_embeddings_from_outside_are_refused() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    noisy(model)
    with pytest.raises(UnsupportedModelError, match="inputs_embeds"):
        model(inputs_embeds=model.get_input_embeddings()(data["input_ids"]))


@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_bf16_is_close_to_float32(fidelity: str) -> None:
    data = text_batch("causal_lm")
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny("llama", "causal_lm", dtype)
        noisy(model, fidelity)
        logits[dtype] = model(**data).logits.float()
    assert float((logits[torch.bfloat16] - logits[torch.float32]).norm() / logits[torch.float32].norm()) < 0.03


def test_attention_by_frequency_shows_the_correction(tmp_path: Path) -> None:
    model, reference = tiny("gpt2", "causal_lm").eval(), tiny("gpt2", "causal_lm").eval()
    shares = torch.linspace(0.01, 1.0, VOCABULARY)
    batches = [{"input_ids": torch.randint(0, VOCABULARY, (4, 12))} for _ in range(3)]
    with pytest.raises(ConfigurationError, match="without Re-Attention"):
        inspect_attention(model, batches, shares)
    noisy(model, deviation=0.05)
    found = inspect_attention(model, batches, shares, reference, bins=4)
    assert found.noise_free is not None
    assert all(len(values) == 4 for values in (found.frequencies, found.plain, found.corrected, found.noise_free))
    assert found.frequencies == sorted(found.frequencies)
    assert found.corrected[0] < found.plain[0]  # rare tokens get less
    assert found.corrected[-1] > found.plain[-1]
    found.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_attention_to_tokens_of_no_frequency_is_told_as_that() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    noisy(model)
    found = inspect_attention(model, [data], frequencies=torch.zeros(VOCABULARY), bins=2)
    (frequency, *empty), (got, *nothing) = found.frequencies, found.plain
    assert frequency == 0.0
    assert got == pytest.approx(1.0)
    assert all(value != value for value in (*empty, *nothing))
