"""Re-Attention on every family: off, it is plain attention; on, per-example gradients stay exact."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor, nn

import hf_dp.parts.re_attention.attention as implementation
from hf_dp import ReAttentionConfig, load_re_attention, remove_re_attention
from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.parts.re_attention import FILE, ReAttention, inspect_attention, installed
from hf_dp.parts.re_attention.deviations import one_step, relative_counts
from hf_dp.parts.re_attention.moments import Moments
from hf_dp.per_example import preflight, record
from hf_dp.per_example.oracle import loop
from tests.zoo import VOCABULARY, text_batch, tiny, with_dropout

FAMILIES = {
    **dict.fromkeys(("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"), "causal_lm"),
    **dict.fromkeys(("phi3", "llama_tied"), "causal_lm"),
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
OF_EACH_FIDELITY = {"gpt2", "gemma2"}
USUAL = OF_EACH_FIDELITY | {"bert", "modernbert", "vit", "t5"}


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


@pytest.mark.parametrize("family", ["bloom", "gptj", "falcon", "gpt_neo", "deberta-v2", "albert"])
def test_a_family_that_does_not_dispatch_is_refused(family: str) -> None:
    head = "sequence" if family in ("deberta-v2", "albert") else "causal_lm"
    model, data = tiny(family, head), text_batch(head)
    noisy(model)
    with pytest.raises(UnsupportedModelError, match=r"attention interface|attends twice"):
        model(**data)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fidelity", FIDELITIES)
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


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_a_cache_keeps_the_noise_of_its_keys(family: str) -> None:
    model, ids = tiny(family, "causal_lm").eval(), text_batch("causal_lm")["input_ids"]
    noisy(model)
    whole = model(input_ids=ids).logits
    first = model(input_ids=ids[:, :4], use_cache=True)
    rest = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values).logits
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
    assert float((plain - expected).norm()) > 10 * float((loaded(**data).logits - expected).norm())


def test_prompts_of_peft_carry_their_noise_or_are_refused() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, data = get_peft_model(tiny("llama", "causal_lm"), config), text_batch("causal_lm")
    attention = noisy(model)
    model(**data)
    assert all(value > 0 for value in attention.corrections.take_means().values())


def test_embeddings_from_outside_are_refused() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    noisy(model)
    with pytest.raises(UnsupportedModelError, match="inputs_embeds"):
        model(inputs_embeds=model.get_input_embeddings()(data["input_ids"]))


def test_an_interrupt_leaves_nothing_behind() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    noisy(model)
    expected = model(**data).logits

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.transformer.h[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**data)
    handle.remove()
    assert torch.equal(model(**data).logits, expected)
    assert torch.overrides._get_current_function_mode() is None


def test_an_interrupt_is_forgotten_where_generation_goes_past_what_lies_around_the_model() -> None:
    model, ids = (
        get_peft_model(tiny("llama", "causal_lm"), LoraConfig(r=2)).eval(),
        text_batch("causal_lm")["input_ids"],
    )
    noisy(model)
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(input_ids=ids, **options)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.get_base_model().model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids)
    handle.remove()
    with pytest.raises(UnsupportedModelError, match="interrupted"):
        model.generate(input_ids=ids, **options)
    assert torch.equal(model.generate(input_ids=ids, **options), expected)
    assert torch.overrides._get_current_function_mode() is None


def test_models_are_freed_and_merged_ones_are_plain() -> None:
    model = get_peft_model(tiny("llama", "causal_lm"), LoraConfig(r=2))
    noisy(model)
    merged = model.merge_and_unload()
    remove_re_attention(merged)
    merged(**text_batch("causal_lm"))
    other = tiny("gpt2", "causal_lm")
    noisy(other)
    other(**text_batch("causal_lm"))
    seen = weakref.ref(other)
    del other
    gc.collect()
    assert seen() is None


def test_saved_and_loaded_it_attends_the_same(tmp_path: Path) -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    attention = noisy(model)
    expected: Tensor = model(**data).logits
    model.save_pretrained(tmp_path)
    attention.save(tmp_path)
    assert "re_attention" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert not torch.equal(loaded(**data).logits, expected)
    load_re_attention(loaded, tmp_path)
    torch.testing.assert_close(loaded(**data).logits, expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(ConfigurationError, match="another size|has not"):
        load_re_attention(tiny("bert", "sequence"), tmp_path)
    (tmp_path / FILE).write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match="no saved Re-Attention"):
        load_re_attention(loaded, tmp_path)
    with pytest.raises(ConfigurationError, match="no saved Re-Attention"):
        load_re_attention(loaded, tmp_path.parent)
    with pytest.raises(ConfigurationError, match="is no directory, and no repository"):
        load_re_attention(loaded, tmp_path / "elsewhere")


@pytest.mark.parametrize("shape", [(VOCABULARY,), (VOCABULARY, 1, 1), (VOCABULARY, 3), (1, 1)])
def test_a_file_whose_errors_have_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = tiny("gpt2", "causal_lm")
    attention = noisy(model)
    attention.errors["transformer.wte.weight"] = torch.ones(shape)
    attention.save(tmp_path)
    with pytest.raises(ConfigurationError, match="of another size"):
        load_re_attention(model, tmp_path)


def test_a_model_that_was_cast_keeps_its_noise_and_one_that_was_resized_is_refused() -> None:
    model, data = tiny("gpt2", "causal_lm", torch.float32), text_batch("causal_lm")
    noisy(model)
    expected = model(**data).logits.detach()
    torch.testing.assert_close(model.double()(**data).logits.float(), expected, rtol=1e-3, atol=1e-4)
    model.resize_token_embeddings(VOCABULARY + 5)
    with pytest.raises(ConfigurationError, match="another size"):
        model(**data)


def test_noise_that_changed_is_what_is_followed() -> None:
    """Also of norms that cast their weight, as Gemma's do, in the type that it has."""
    model, data = tiny("gemma3", "causal_lm", torch.float32).eval(), text_batch("causal_lm")
    attention = noisy(model)
    model(**data)
    attention.errors = {name: error / 10 for name, error in attention.errors.items()}
    found = model(**data).logits
    noisy(model, deviation=0.005)
    torch.testing.assert_close(found, model(**data).logits, rtol=1e-6, atol=1e-6)


def test_a_copied_model_has_its_own() -> None:
    model, data = tiny("llama", "causal_lm"), text_batch("causal_lm")
    plain = model(**data).logits
    noisy(model)
    expected = model(**data).logits
    other = copy.deepcopy(model)
    remove_re_attention(model)
    assert torch.equal(other(**data).logits, expected)
    assert torch.equal(model(**data).logits, plain)
    remove_re_attention(other)
    assert torch.equal(other(**data).logits, plain)


def test_a_copied_part_is_refused() -> None:
    model, data = tiny("llama", "causal_lm"), text_batch("causal_lm")
    noisy(model)
    part = copy.deepcopy(model.model)
    with pytest.raises(ConfigurationError, match="it is gone"):
        part(data["input_ids"])
    remove_re_attention(part)
    part(data["input_ids"])


def test_a_replica_is_refused() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    noisy(model)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(UnsupportedModelError, match="DataParallel"):
        replica(**data)


def test_merged_adapters_are_refused() -> None:
    model, data = get_peft_model(tiny("llama", "causal_lm"), LoraConfig(r=2)), text_batch("causal_lm")
    noisy(model)
    expected = model(**data).logits
    model.merge_adapter()
    with pytest.raises(UnsupportedModelError, match="merged"):
        model(**data)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**data).logits, expected)


def test_a_pickled_model_has_its_own() -> None:
    model, data = tiny("gpt2", "causal_lm").eval(), text_batch("causal_lm")
    noisy(model)
    model(**data)
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(**data).logits, model(**data).logits)
    assert installed(loaded) not in (None, installed(model))
    plain = tiny("gpt2", "causal_lm").eval()
    remove_re_attention(loaded)
    torch.testing.assert_close(loaded(**data).logits, plain(**data).logits)


def test_an_error_in_the_forward_pass_leaves_nothing_behind() -> None:
    model, data = tiny("gpt2", "causal_lm"), text_batch("causal_lm")
    attention = noisy(model)
    expected = model(**data).logits
    with pytest.raises(IndexError):
        model(input_ids=data["input_ids"] + VOCABULARY)
    assert torch.overrides._get_current_function_mode() is None
    assert torch.equal(model(**data).logits, expected)
    assert attention.corrections.take_means()


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
