"""Adapters of any name are saved and read again: as checkpoints, as the best one, and in a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import CPTConfig, IA3Config, LNTuningConfig, LoraConfig, PeftModel, XLoraConfig, get_peft_model
from torch import nn
from transformers import TrainerCallback

from hf_dp import PrivacyConfig
from hf_dp.errors import ConfigurationError
from hf_dp.hub import verify
from hf_dp.training.adapters import read_adapters
from hf_dp.training.refusals import refuse_adapters_in_part
from tests.training.own_loops import begun, loop
from tests.training.workbench import classifier, make, parameters, rows, same
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")
NAMES = [
    ("default", None),
    ("one", None),
    pytest.param("a", None, marks=pytest.mark.slow),
    ("q_lin", None),
    pytest.param("0", None, marks=pytest.mark.slow),
    ("one", "one2"),
    pytest.param("one", "default", marks=pytest.mark.slow),
]
CLASHES = [("weight", None), ("q_lin", "one"), ("default", "0"), ("default", "weight"), ("default", "model")]


def adapted(name: str, other: str | None = None) -> Any:
    """With an adapter that is trained, and perhaps one that is not."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_lin", "v_lin"], task_type="SEQ_CLS")
    model = get_peft_model(classifier(), config, adapter_name=name)
    if other is not None:
        model.add_adapter(other, LoraConfig(r=2, target_modules=["q_lin"], task_type="SEQ_CLS"))
        model.set_adapter(name)
    return model


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


class Kept(TrainerCallback):
    """The parameters at each checkpoint."""

    def __init__(self) -> None:
        self.points: list[dict[str, torch.Tensor]] = []

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.points.append(parameters(model))


def with_the_best(path: Path, model: nn.Module) -> Any:
    """A trainer whose second checkpoint of three is the best, and the parameters at each."""
    each: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    parts = {"eval_dataset": rows(4, seed=5), "callbacks": [kept := Kept()]}
    trainer = make(path, model, PrivacyConfig(target_epsilon=3), parts=parts, max_steps=3, **each, **best)
    trainer.evaluate = lambda *args, **kwargs: {"eval_loss": abs(trainer.state.global_step - 2)}
    trainer.train()
    return trainer, kept.points


@pytest.mark.parametrize(("name", "other"), NAMES)
@pytest.mark.slow
def test_the_best_checkpoint_of_an_adapter_of_any_name(tmp_path: Path, name: str, other: str | None) -> None:
    trainer, points = with_the_best(tmp_path, adapted(name, other))
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    assert same(parameters(trainer.model), points[1])
    assert not same(points[1], points[2])
    trainer.save_model(str(tmp_path / "saved"))
    assert verify(tmp_path / "saved").private
    place = tmp_path / "saved" if name == "default" else tmp_path / "saved" / name
    again = PeftModel.from_pretrained(classifier(), place, adapter_name=name)
    read = parameters(again)
    assert same({key: value for key, value in points[1].items() if key in read}, read)


@pytest.mark.parametrize("name", ["one", "q_lin"])
@pytest.mark.slow
def test_an_adapter_of_any_name_resumes(tmp_path: Path, name: str) -> None:
    whole = make(tmp_path, adapted(name), save_strategy="steps", save_steps=2)
    whole.train()
    again = make(tmp_path, adapted(name), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(parameters(whole.model), parameters(again.model))


@pytest.mark.slow
def test_two_adapters_that_are_trained_together_resume(tmp_path: Path) -> None:
    def both() -> Any:
        model: Any = get_peft_model(classifier(), LoraConfig(r=2, target_modules=["q_lin"]), adapter_name="one")
        model.add_adapter("two", LoraConfig(r=2, target_modules=["v_lin"]))
        model.base_model.set_adapter(["one", "two"])
        return model

    torch.manual_seed(0)
    whole = make(tmp_path, both(), save_strategy="steps", save_steps=2)
    whole.train()
    again = make(tmp_path, both(), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(trained(whole.model), trained(again.model))
    assert {key.split(".")[-2] for key in trained(again.model)} == {"one", "two"}


def test_in_16_bits_what_is_read_stays_in_16_bits(tmp_path: Path) -> None:
    model = adapted("one").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    before = parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.requires_grad)
    read_adapters(tmp_path, model)
    assert same(parameters(model), before)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def unfrozen(names: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(classifier(), LoraConfig(r=2, target_modules=["q_lin"], **changes))
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or names in name)
    return model


@pytest.mark.parametrize("changes", [{}, {"bias": "lora_only"}])
def test_weights_that_peft_does_not_save_are_refused_before_anything_is_spent(tmp_path: Path, changes: Any) -> None:
    trainer = make(tmp_path, unfrozen("layer_norm", **changes))
    # PEFT 0.20 does not save the biases of lora_only either, and the first is named.
    with pytest.raises(
        ConfigurationError, match=r"(layer_norm|bias).* is trained, and PEFT does not save it"
    ) as refused:
        trainer.train()
    assert trainer.ledger.steps == 0
    assert "modules_to_save" in refused.value.fix


def test_what_peft_saves_is_no_weight_that_it_does_not_save(tmp_path: Path) -> None:
    with_norms = LoraConfig(r=2, target_modules=["q_lin"], modules_to_save=["sa_layer_norm"])
    trainer = make(tmp_path, whole := get_peft_model(classifier(), with_norms), save_strategy="steps", save_steps=1)
    trainer.train()
    torch.manual_seed(1)
    again = make(tmp_path, get_peft_model(classifier(), with_norms), save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(trained(whole), trained(again.model))
    for model in (
        unfrozen("nothing", bias="all"),
        unfrozen("nothing", trainable_token_indices=[1]),
        get_peft_model(classifier(), IA3Config(target_modules=["q_lin"], feedforward_modules=[])),
        get_peft_model(classifier(), LNTuningConfig(target_modules=["sa_layer_norm"])),
        get_peft_model(classifier(), LoraConfig(r=2, target_modules=["q_lin", "word_embeddings"])),
    ):
        refuse_adapters_in_part(model)


@pytest.mark.parametrize("of", [1, 2])
def test_x_lora_is_refused_with_what_peft_leaves_out_of_it(tmp_path: Path, of: int) -> None:
    places = {str(i): str(tmp_path) for i in range(of)}
    llama = tiny("llama", "causal_lm", torch.float32)
    get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    llama = tiny("llama", "causal_lm", torch.float32)
    llama.config.use_cache = False
    mixture = XLoraConfig(task_type="CAUSAL_LM", hidden_size=llama.config.hidden_size, xlora_depth=2, adapters=places)
    with pytest.raises(ConfigurationError, match="X-LoRA") as refused:
        refuse_adapters_in_part(get_peft_model(llama, mixture))
    assert "LoRA adapter" in refused.value.fix
    assert "adapter_name" not in refused.value.fix


def test_cpt_is_refused_by_its_name_with_what_takes_its_place() -> None:
    prompt = CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2], num_virtual_tokens=2
    )
    with pytest.raises(ConfigurationError, match="CPTConfig") as refused:
        refuse_adapters_in_part(get_peft_model(tiny("llama", "causal_lm", torch.float32), prompt))
    assert "PromptTuningConfig" in refused.value.fix


@pytest.mark.slow
def test_a_loop_of_ones_own_resumes_an_adapter_of_another_name(tmp_path: Path) -> None:
    whole = adapted("one")
    run, optimizer, scheduler = begun(whole, output_dir=tmp_path)
    loop(run, optimizer, scheduler, save_at=2)
    again = adapted("one")
    loop(*begun(again, output_dir=tmp_path, resume=tmp_path / "checkpoint-2"))
    assert same(parameters(whole), parameters(again))


@pytest.mark.parametrize(("name", "other"), CLASHES)
def test_names_by_which_peft_would_lose_weights_are_refused_before_anything_is_spent(
    tmp_path: Path, name: str, other: str | None
) -> None:
    trainer = make(tmp_path, adapted(name, other))
    with pytest.raises(ConfigurationError, match="has the name of an adapter where another name stands"):
        trainer.train()
    assert not trainer.ledger.charges


@pytest.mark.parametrize(("name", "other"), NAMES)
def test_other_names_are_not(name: str, other: str | None) -> None:
    refuse_adapters_in_part(adapted(name, other))
    refuse_adapters_in_part(classifier())


class Switch(TrainerCallback):
    """To another adapter, in mid-training."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            model.set_adapter("two")


@pytest.mark.slow
def test_what_is_trained_from_some_step_on_is_for_a_training_after_this_one(tmp_path: Path) -> None:
    model: Any = get_peft_model(classifier(), LoraConfig(r=2, target_modules=["q_lin"]), adapter_name="one")
    model.add_adapter("two", LoraConfig(r=2, target_modules=["v_lin"]))
    model.set_adapter("one")
    first = make(tmp_path, model, PrivacyConfig(target_epsilon=3), parts={"callbacks": [Switch()]})
    with pytest.raises(ConfigurationError, match=r"(?s)two.*begin another with PrivacyConfig\(after="):
        first.train()
    assert first.ledger.steps == 2
    first.save_model(str(tmp_path / "first"))
    both = PrivacyConfig(target_epsilon=8, after=str(tmp_path / "first"))
    second = make(tmp_path / "second", model, both)
    second.train()
    second.save_model(str(tmp_path / "both"))
    assert verify(tmp_path / "both").private
    spent = second.privacy_report().epsilon
    assert first.privacy_report().epsilon < spent <= 8
