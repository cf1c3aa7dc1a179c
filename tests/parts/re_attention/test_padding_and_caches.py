"""Re-Attention sees each example's own keys: padding changes nothing, and kept or encoded keys bring their noise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_dp.errors import UnsupportedModelError
from tests.architectures import VOCABULARY
from tests.parts.re_attention.noisy import FIDELITIES, noisy
from tests.zoo import text_batch, tiny


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_a_cache_keeps_the_noise_of_its_keys(family: str) -> None:
    model, ids = tiny(family, "causal_lm").eval(), text_batch("causal_lm")["input_ids"]
    noisy(model)
    whole = model(input_ids=ids).logits
    first = model(input_ids=ids[:, :4], use_cache=True)
    # Named past_key_values before Transformers 5.24.
    name = "cache" if "cache" in first else "past_key_values"
    rest = model(input_ids=ids[:, 4:], **{name: first[name]}).logits
    torch.testing.assert_close(rest, whole[:, 4:], rtol=1e-3, atol=1e-6)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(ids, use_cache=True, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize(("family", "head"), [("qwen3", "causal_lm"), ("modernbert", "masked_lm")])
def test_padding_beside_an_example_changes_nothing(family: str, head: str, fidelity: str, side: str) -> None:
    """How long the other examples of its batch are must not be seen in what an example gives."""
    model, ids = tiny(family, head).eval(), torch.randint(3, VOCABULARY, (3, 40))
    noisy(model, fidelity)
    alone = model(input_ids=ids, position_ids=torch.arange(40).expand(3, -1)).logits
    for count in (25, 60):
        width = (count, 0) if side == "left" else (0, count)
        mask = F.pad(torch.ones_like(ids), width)
        beside = F.pad(ids, width)
        # One has no padding, and is not looked at.
        mask[2], beside[2] = 1, 5
        places = (mask.cumsum(1) - 1).clamp_min(0)
        padded = model(input_ids=beside, attention_mask=mask, position_ids=places).logits
        start = width[0]
        torch.testing.assert_close(padded[:2, start : start + 40], alone[:2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_padding_whose_noise_grows_without_bound_is_not_seen(family: str, fidelity: str, side: str) -> None:
    """A row of zeros, normalised, is nothing but noise; so is what the next layers make of it."""
    model = tiny(family, "causal_lm").float().eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0.0
    ids = torch.randint(3, VOCABULARY, (1, 12))
    attention = noisy(model, fidelity, 3e-3)
    attention.errors["model.embed_tokens.weight"][0] = 1e15
    alone, expected = model(input_ids=ids).logits, attention.corrections.take_means()
    width = (8, 0) if side == "left" else (0, 8)
    mask = F.pad(torch.ones_like(ids), width)
    places = (mask.cumsum(1) - 1).clamp_min(0)
    padded = model(input_ids=F.pad(ids, width), attention_mask=mask, position_ids=places).logits
    torch.testing.assert_close(padded[:, width[0] : width[0] + 12], alone, rtol=1e-4, atol=1e-5)
    for name, found in attention.corrections.take_means().items():
        # Padding still asks, and nobody looks at what it is answered.
        assert found == pytest.approx(expected[name], rel=2)


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize(
    ("family", "head"), [("llama", "causal_lm"), ("phi3", "causal_lm"), ("modernbert", "masked_lm")]
)
def test_relative_positions_need_no_ids_behind_padding_on_the_left(family: str, head: str, fidelity: str) -> None:
    """Rotary embeddings see differences of positions alone, and so must the noise of what they rotate."""
    model, ids = tiny(family, head).eval(), torch.randint(3, VOCABULARY, (1, 12))
    noisy(model, fidelity)
    beside, mask = F.pad(ids, (20, 0)), F.pad(torch.ones_like(ids), (20, 0))
    padded = model(input_ids=beside, attention_mask=mask).logits[:, 20:]
    # Angles are in float32.
    torch.testing.assert_close(padded, model(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fidelity", FIDELITIES)
def test_padding_of_what_is_encoded_changes_nothing_in_the_decoder(fidelity: str, side: str) -> None:
    model, ids = tiny("t5", "seq2seq").eval(), torch.randint(3, VOCABULARY, (2, 12))
    noisy(model, fidelity)
    said = {"decoder_input_ids": torch.randint(3, VOCABULARY, (2, 25))}
    width = (20, 0) if side == "left" else (0, 20)
    beside, mask = F.pad(ids, width), F.pad(torch.ones_like(ids), width)
    padded = model(input_ids=beside, attention_mask=mask, **said).logits
    torch.testing.assert_close(padded, model(input_ids=ids, **said).logits, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_decoder_generates_from_what_its_encoder_said() -> None:
    model, data = tiny("t5", "seq2seq").eval(), text_batch("seq2seq")
    noisy(model)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    inputs = {name: data[name] for name in ("input_ids", "attention_mask")}
    cached = model.generate(**inputs, use_cache=True, **options)
    assert torch.equal(cached, model.generate(**inputs, use_cache=False, **options))


def test_what_an_encoder_said_is_followed_or_refused() -> None:
    model, data = tiny("t5", "seq2seq").eval(), text_batch("seq2seq")
    noisy(model)
    expected = model(**data).logits
    inputs = {name: data[name] for name in ("input_ids", "attention_mask")}
    said = model.get_encoder()(**inputs).last_hidden_state
    rest = {name: values for name, values in data.items() if name != "input_ids"}
    assert torch.equal(model(encoder_outputs=(said,), **rest).logits, expected)
    with pytest.raises(UnsupportedModelError, match="encoder_outputs"):
        model(encoder_outputs=(said.clone(),), **rest)
    with pytest.raises(UnsupportedModelError, match="num_return_sequences"):
        model.generate(**inputs, num_return_sequences=2, do_sample=True, max_new_tokens=2)


def test_a_reordered_cache_is_refused() -> None:
    model, ids = tiny("llama", "causal_lm").eval(), text_batch("causal_lm")["input_ids"]
    noisy(model)
    with pytest.raises(UnsupportedModelError, match="beam search"):
        model.generate(ids, num_beams=2, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
