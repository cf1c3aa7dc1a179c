"""Re-Attention with PEFT: noise is in the adapters' own matrices; what carries none that is known is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from hf_dp import load_re_attention
from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import record
from hf_dp.per_example.oracle import loop
from tests.parts.re_attention.noisy import noisy, off_by
from tests.zoo import text_batch, tiny


@pytest.mark.slow
def test_lora_carries_noise_in_its_own_matrices_only() -> None:
    model = get_peft_model(tiny("llama", "causal_lm"), LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    attention = noisy(model)
    assert attention.errors
    assert all("lora_" in name for name in attention.errors)
    data = text_batch("causal_lm")
    assert off_by(record(model, per_example_losses, data), loop(model, per_example_losses, data)) <= 1e-12
    assert all(value > 0 for value in attention.corrections.take_means().values())


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj"], ["k_proj"]])
def test_lora_on_some_projections(targets: list[str]) -> None:
    model = get_peft_model(tiny("llama", "causal_lm"), LoraConfig(r=2, target_modules=targets))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    attention, data = noisy(model), text_batch("causal_lm")
    assert off_by(record(model, per_example_losses, data), loop(model, per_example_losses, data)) <= 1e-12
    values = list(attention.corrections.take_means().values())
    # Noise in queries alone is in no key, and what it does to attention is not followed.
    assert all(value > 0 for value in values[-1:])
    assert bool(values) == (targets != ["q_proj"])


def test_an_adapter_that_is_only_evaluated_is_corrected(tmp_path: Path) -> None:
    model, data = get_peft_model(tiny("llama", "causal_lm"), LoraConfig(r=2, target_modules=["k_proj"])), {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    data = text_batch("causal_lm")
    attention = noisy(model.eval())
    expected = model(**data).logits
    model.save_pretrained(tmp_path)
    attention.save(tmp_path)
    loaded = PeftModel.from_pretrained(tiny("llama", "causal_lm"), tmp_path).eval().double()
    plain = loaded(**data).logits
    load_re_attention(loaded, tmp_path)
    torch.testing.assert_close(loaded(**data).logits, expected, rtol=1e-6, atol=1e-9)
    assert (plain - expected).norm() > 10 * (loaded(**data).logits - expected).norm()


def test_prompts_of_peft_carry_their_noise_or_are_refused() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, data = get_peft_model(tiny("llama", "causal_lm"), config), text_batch("causal_lm")
    attention = noisy(model)
    model(**data)
    assert all(value > 0 for value in attention.corrections.take_means().values())


def test_merged_adapters_are_refused() -> None:
    model, data = get_peft_model(tiny("llama", "causal_lm"), LoraConfig(r=2)), text_batch("causal_lm")
    noisy(model)
    expected = model(**data).logits
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match="merged"):
        model(**data)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**data).logits, expected)
