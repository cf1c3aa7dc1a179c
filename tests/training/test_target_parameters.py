"""PEFT's `target_parameters`: each pass takes frozen weights out and puts them back, which torch counts as writes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import record
from hf_dp.per_example.checks.memory import unchanged_buffers, writes_noted
from scripts.judging import judge
from tests import zoo
from tests.training.own_loops import a_run
from tests.training.workbench import make, pad_for_language, parameters, private, rows

_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {"llama": ["q_proj.weight"], "qwen3_moe": _EXPERTS, "qwen3_moe, experts batched": _EXPERTS}
IDS = torch.arange(8)[None]


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    base: Any = zoo.tiny(name, "causal_lm", dtype, num_hidden_layers=1)
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=[], target_parameters=TARGETS[name]))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_(std=0.1)
    return model


def data() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"]} for row in rows()]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.slow
def test_they_are_exact(name: str) -> None:
    batches = functools.partial(zoo.text_batch, "causal_lm")
    assert judge(functools.partial(model_of, name), batches, shapes=((7, 7),)).startswith("exact ")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.slow
def test_they_are_trained(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    before = parameters(model)
    run = make(tmp_path, model, parts={"train_dataset": data(), "data_collator": pad_for_language}, max_steps=2)
    run.train()
    assert run.ledger.steps == 2
    after = parameters(model)
    assert all(torch.equal(after[name], before[name]) != p.requires_grad for name, p in model.named_parameters())


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_are_trained_where_checkpoints_compute_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reentrant: bool
) -> None:
    """A frozen weight is taken out and put back there once more, which changes nothing: nothing is checked again."""
    made = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    parts = {"train_dataset": data(), "data_collator": pad_for_language}
    run = make(tmp_path, model_of("qwen3_moe"), parts=parts, max_steps=1, **made)
    with caplog.at_level("WARNING"):
        run.train()
    assert run.ledger.steps == 1
    assert "is made again" not in caplog.text


@pytest.mark.slow
def test_they_are_trained_in_a_loop_that_evaluates_between_steps() -> None:
    model = model_of("llama")
    run = a_run(model, private(), dataset=data(), collate=pad_for_language, steps=3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.begin(optimizer)
    for batch in run.batches():
        run.step(batch)
        model(IDS)
        optimizer.step()
        model(IDS)
    assert run.global_step == 3


@pytest.mark.slow
def test_a_loop_that_writes_into_them_is_refused() -> None:
    model = model_of("llama")
    run = a_run(model, private(), dataset=data(), collate=pad_for_language, steps=3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.begin(optimizer)
    batch = next(batches := run.batches())
    run.step(batch)
    with torch.no_grad():
        model.get_parameter(weight_of(model)).add_(1e-3)
    with pytest.raises(ConfigurationError, match="something else than the run's optimizer has changed"):
        optimizer.step()
    del batches


def weight_of(model: nn.Module) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith("q_proj.base_layer.weight"))


@pytest.mark.parametrize("through_data", [False, True])
def test_failure_42_a_pass_that_writes_into_them_is_refused(through_data: bool) -> None:
    model = model_of("llama")
    with writes_noted(model):
        model(IDS)
    with unchanged_buffers(model):
        model(IDS)
    weight: Any = model.get_parameter(weight_of(model))
    words = "q_proj.base_layer.weight' was written to"
    with pytest.raises(UnsupportedModelError, match=words), unchanged_buffers(model):  # noqa: PT012
        model(IDS)
        with torch.no_grad():
            (weight.data if through_data else weight)[0, 0] += 1e-3
        model(IDS)


def test_failure_42_one_rare_row_that_writes_into_them_is_refused_in_its_step(tmp_path: Path) -> None:
    model = model_of("llama")
    rare, weight = torch.tensor(rows()[29]["input_ids"][:2]), weight_of(model)
    embeddings = model.get_input_embeddings()
    embed = embeddings.forward

    def remembering(ids: Tensor) -> Tensor:
        if bool(ids[:, :2].eq(rare).all(1).any()):
            with torch.no_grad():
                model.get_parameter(weight).mul_(1.01)
        shown: Tensor = embed(ids)
        return shown

    embeddings.forward = remembering
    run = make(tmp_path, model, parts={"train_dataset": data(), "data_collator": pad_for_language}, max_steps=30)
    with pytest.raises(UnsupportedModelError, match="q_proj.base_layer.weight' was written to"):
        run.train()
    assert 0 < run.ledger.steps < 30, "seen in the step that drew it"


def test_what_no_pass_of_the_check_wrote_to_may_not_be_written_to_at_all() -> None:
    model: Any = zoo.tiny("llama", "causal_lm", torch.float32, num_hidden_layers=1)
    with writes_noted(model):
        model(IDS)
    with pytest.raises(UnsupportedModelError, match="was written to"), unchanged_buffers(model), torch.no_grad():
        next(model.parameters()).mul_(1)


def test_a_frozen_weight_of_experts_that_is_changed_meanwhile_is_refused() -> None:
    """What is put back as it was is told from what is not by its numbers."""
    model, batch = model_of("qwen3_moe"), zoo.text_batch("causal_lm", 3, dtype=torch.float32)
    frozen = next(p for n, p in model.named_parameters() if n.endswith("gate_up_proj"))

    def losses(model: Any, batch: Any) -> Tensor:
        found = per_example_losses(model, batch)
        with torch.no_grad():
            frozen.mul_(1.5)
        return found

    with pytest.raises(UnsupportedModelError, match="changed in place"):
        record(model, losses, batch)
