"""LoRA through PEFT: only the adapter trains and is saved, in whatever order model, dtype and trainer come."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from hf_dp import PrivacyConfig
from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.hub import verify
from hf_dp.training.saving import refuse_unloaded
from tests.architectures import VOCABULARY
from tests.training.workbench import classifier, make, pad, pad_for_language, parameters, rows, same, with_lora
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


SEES = ".*(vision_model|connector).*"


@torch.no_grad()
def delta(model: Any) -> float:
    """The size of B A, over all adapted layers."""
    total = 0.0
    for module in model.modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            total += float((module.lora_B["default"].weight @ module.lora_A["default"].weight).float().norm())
    return total


@pytest.mark.slow
def test_an_adapter_of_another_name_is_saved_and_verified(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_lin"], task_type="SEQ_CLS")
    trainer = make(tmp_path, get_peft_model(classifier(), config, adapter_name="mine"), PrivacyConfig(target_epsilon=3))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved/mine/adapter_model.safetensors").exists()
    assert verify(tmp_path / "saved").private


@pytest.mark.parametrize(("begin", "is_told"), [("eva", True), ("corda", True), ("gaussian", False), (True, False)])
@pytest.mark.slow
def test_adapters_that_begin_from_data_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begin: Any, is_told: bool
) -> None:
    model = with_lora()
    model.peft_config["default"].init_lora_weights = begin
    make(tmp_path, model, PrivacyConfig(target_epsilon=3), max_steps=1).train()
    assert (f"init_lora_weights={begin!r} computes of data" in caplog.text) == is_told


def test_only_the_adapter_is_trained_and_saved_and_it_loads_again(tmp_path: Path) -> None:
    model = with_lora()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    before = parameters(model)
    trainer = make(tmp_path, model, save_strategy="steps", save_steps=2)
    trainer.train()
    after = parameters(model)
    assert trainer.model is model
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in frozen), name
    trainer.save_model(str(tmp_path / "adapter"))
    for folder in (tmp_path / "adapter", tmp_path / "checkpoint-2"):
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved
        assert all("lora_" in name or "classifier" in name for name in saved)
        assert not (folder / "model.safetensors").exists()
        assert (folder / "privacy.json").exists()
    again = PeftModel.from_pretrained(classifier(), tmp_path / "adapter")
    batch = pad(rows(4))
    model.eval()
    again.eval()
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits, again(**batch).logits, atol=1e-6)


def moved(model: Any) -> Any:
    """As `.to(device)` may do: every parameter becomes a new object with new memory."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model._apply(torch.clone)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


ORDERS = {
    "wrap, train": lambda m: with_lora(m),
    "cast, wrap": lambda m: with_lora(m.to(torch.bfloat16)),
    "wrap, cast": lambda m: with_lora(m).to(torch.bfloat16),
    "wrap, cast there and back": lambda m: with_lora(m).to(torch.float64).to(torch.float32),
    "wrap, move": lambda m: moved(with_lora(m)),
    "move, wrap": lambda m: with_lora(moved(m)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("order", "name"),
    [
        # Each order with the one or the other.
        pytest.param(order, name, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, order in enumerate(ORDERS)
        for j, name in enumerate(("gpt2", "distilbert"))
    ],
)
def test_failure_18_the_adapter_moves_in_any_order_of_wrapping_and_casting(
    tmp_path: Path, name: str, order: str
) -> None:
    model = ORDERS[order](classifier() if name == "distilbert" else tiny(name, "causal_lm", torch.float32, n_layer=1))
    collate = pad_for_language if name == "gpt2" else pad
    assert delta(model) == 0
    make(tmp_path, model, max_steps=1, parts={"data_collator": collate}).train()
    assert delta(model) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [lambda m: m.to(torch.bfloat16), lambda m: m.to(torch.float64), moved])
def test_failure_18_the_adapter_moves_though_the_model_is_cast_or_moved_after_the_trainer_was_made(
    tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    model = with_lora()
    trainer = make(tmp_path, model, max_steps=1)
    change(model)
    trainer.train()
    assert delta(model) > 0
    assert trainer.ledger.steps == 1


def test_failure_18_an_optimizer_made_before_the_adapter_is_refused(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = with_lora(model, task_type=None)
    with pytest.raises(ConfigurationError, match=r"SGD holds none[\s\S]*adding adapters"):
        make(tmp_path, wrapped, parts={"optimizers": (optimizer, None)})


def test_failure_18_a_model_wrapped_behind_the_trainers_back_is_not_trained_in_silence(tmp_path: Path) -> None:
    """PEFT changes the model in place: the trainer, made before, must train what is there now."""
    model = classifier()
    trainer = make(tmp_path, model, max_steps=1)
    wrapped = with_lora(model)
    trainer.train()
    assert delta(wrapped) > 0


@pytest.mark.slow
def test_modules_to_save_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    model = with_lora(classifier(), modules_to_save=["pre_classifier", "classifier"])
    before = parameters(model)
    trainer = make(tmp_path, model)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    changed = {name for name, p in parameters(model).items() if not torch.equal(p, before[name])}
    assert {name for name in changed if "pre_classifier" in name and "modules_to_save" in name}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    again = PeftModel.from_pretrained(classifier(), tmp_path / "adapter")
    batch = pad(rows(4))
    model.eval()
    again.eval()
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits, again(**batch).logits, atol=1e-6)


@pytest.mark.slow
def test_an_adapter_resumes(tmp_path: Path) -> None:
    def run(path: Path) -> Any:
        return make(path, with_lora(), save_strategy="steps", save_steps=2)

    torch.manual_seed(0)
    whole = run(tmp_path)
    whole.train()
    again = run(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(parameters(whole.model), parameters(again.model))
    assert again.privacy_report() == whole.privacy_report()


def test_an_adapter_that_is_frozen_is_refused(tmp_path: Path) -> None:
    model = with_lora().requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="no trainable parameter"):
        make(tmp_path, model)


@pytest.mark.slow
def test_chats_about_pictures_train_with_any_number_of_pictures_in_a_row(tmp_path: Path) -> None:
    """Adapters on the language model; the collator fills rows up with blank pictures, as SmolVLM's processor does."""
    draw = torch.Generator().manual_seed(0)

    def chat(pictures: int, words: int) -> dict[str, Any]:
        ids = [3] * pictures + torch.randint(4, VOCABULARY, (words,), generator=draw).tolist()
        return {"input_ids": ids, "pixel_values": torch.randn(pictures, 3, 8, 8, generator=draw)}

    def collate(chats: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return pad_for_language(chats) | {
            "pixel_values": nn.utils.rnn.pad_sequence([row["pixel_values"] for row in chats], batch_first=True)
        }

    base = tiny("smolvlm", "image_text", torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear", exclude_modules=SEES))
    chats = [chat(1 + i % 2, 3 + i % 4) for i in range(24)]
    trainer = make(tmp_path, model, parts={"train_dataset": chats, "data_collator": collate})
    before = parameters(model)
    trainer.train()
    assert {name for name, p in parameters(model).items() if not torch.equal(p, before[name])} == {
        name for name, p in model.named_parameters() if p.requires_grad
    }


def test_what_peft_says_of_embeddings_is_left_to_its_own_save() -> None:
    model = get_peft_model(tiny("gpt2", "causal_lm", torch.float32), LoraConfig(r=2, target_modules=["wte"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse_unloaded(model)


def test_adapters_are_merged_into_a_model_that_is_saved_with_its_record(tmp_path: Path) -> None:
    model = with_lora(tiny("gpt2", "causal_lm", torch.float32, n_layer=1), fan_in_fan_out=True)
    trainer = make(tmp_path, model, parts={"data_collator": pad_for_language})
    trainer.train()
    batch = pad(rows(3))
    with torch.no_grad():
        before = model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        said = model.generate(batch["input_ids"][:1, :2], max_new_tokens=3, do_sample=False)
    trainer.save_model(str(tmp_path / "merged"))
    assert ModelCard.load(tmp_path / "merged" / "README.md").data.library_name == "peft"
    merged = model.merge_and_unload()
    with pytest.raises(ConfigurationError, match="the adapter was taken out of the model"):
        trainer.save_model()
    assert not (tmp_path / "adapter_model.safetensors").exists()
    trainer.model = model.get_base_model()
    assert trainer.model is merged
    trainer.save_model(str(tmp_path / "merged"))
    assert (tmp_path / "merged" / "privacy.json").exists()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    card = ModelCard.load(tmp_path / "merged" / "README.md").data
    assert card.library_name == "transformers"
    assert not [tag for tag in card.tags if tag == "lora" or tag.startswith("base_model:adapter:")]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        after = again(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        assert torch.allclose(before, after, atol=1e-5)
        assert torch.equal(said, again.generate(batch["input_ids"][:1, :2], max_new_tokens=3, do_sample=False))
