"""Re-Attention outlives interrupts, saving, copies and casts with the noise that it had, or is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from hf_dp import load_re_attention, remove_re_attention
from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.parts.re_attention import FILE, installed
from tests.architectures import VOCABULARY
from tests.parts.re_attention.noisy import noisy
from tests.zoo import text_batch, tiny


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
    with pytest.raises(ConfigurationError, match="there is no folder"):
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
