"""Clipping by groups in a training: what is dropped as the backward pass goes gives what kept factors give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.in_groups import InGroups
from hf_dp.training import engine
from tests.training.test_passes import CASES, language, trained
from tests.training.workbench import distance, make, pad_for_language, parameters, private, rows
from tests.zoo import tiny

GROUPED = {"clipping": "groups", "groups": {"*bias": 1.0, "*": 3.0}}
OF_LORA = {"clipping": "groups", "groups": {"*lora_A*": 1.0, "*": 3.0}}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case == "rows that survive" else [pytest.mark.slow])
        for case in CASES
        if "automatic" not in case
    ],
)
@pytest.mark.usefixtures("checked_once")
def test_weights_are_those_of_kept_factors(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same noise, which is that of the seed."""
    made: list[InGroups] = []

    class Counted(InGroups):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

    monkeypatch.setattr(engine, "InGroups", Counted)
    groups = OF_LORA if "LoRA" in case else GROUPED
    build, promise, arguments = CASES[case]
    monkeypatch.setitem(CASES, case, (build, {**promise, **groups}, arguments))
    dropped = trained(tmp_path / "dropped", case, 1)
    # Beside those of the check before the first step; in pieces users are summed before they are clipped.
    assert (len(made) > 1) == (case != "users in pieces")
    made.clear()
    monkeypatch.setattr(engine, "is_sharded", lambda model: True)
    kept = trained(tmp_path / "kept", case, 1)
    assert not made
    assert distance(parameters(dropped.model), parameters(kept.model)) < 1e-6
    assert dropped.privacy_report() == kept.privacy_report()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "groups",
    [{"*lora_[AB]*": 1.0, "*": 1.0}, pytest.param({"*lora_A*": 1.0, "*": 1.0}, marks=pytest.mark.slow)],
)
def test_magnitudes_that_come_back_last_are_in_their_group(
    groups: dict[str, float], reentrant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a checkpoint computes again, DoRA's norms of weights, is known in the backward pass alone."""

    def magnitudes(folder: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        task = {"task_type": "SEQ_CLS", "target_modules": ["q_proj", "v_proj"], "use_dora": True}
        base = tiny("llama", "sequence", torch.float32, num_hidden_layers=1)
        model = get_peft_model(base, LoraConfig(r=2, **task))
        privacy = private(noise_multiplier=0, clipping="groups", groups=groups)
        checkpoints = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        trainer = make(tmp_path / folder, model, privacy, max_steps=1, gradient_checkpointing=True, **checkpoints)
        before = parameters(trainer.model)
        trainer.train()
        after = parameters(trainer.model)
        assert any(after[name].ne(before[name]).any() for name in after if "magnitude" in name)
        return after

    dropped = magnitudes("dropped")
    monkeypatch.setattr(engine, "is_sharded", lambda model: True)
    assert distance(dropped, magnitudes("kept")) < 1e-6


@pytest.mark.slow
def test_what_is_used_in_the_backward_pass_alone_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    """A group that was handed on would lack it."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor, layer: Any) -> torch.Tensor:
            ctx.layer = layer
            ctx.save_for_backward(given)
            return given.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            with torch.enable_grad():
                again = ctx.layer(ctx.saved_tensors[0].detach().requires_grad_())
            again.backward(gradients[0])
            return gradients[0], None

    model = language()
    model.transformer.h[0].register_forward_pre_hook(
        lambda module, given: (Again.apply(given[0], model.transformer.ln_f), *given[1:])
    )
    before = parameters(model)
    data = [{"input_ids": row["input_ids"]} for row in rows()]
    privacy = private(clipping="groups", groups={"transformer.ln_f*": 1, "*": 1})
    parts = {"train_dataset": data, "data_collator": pad_for_language}
    trainer = make(tmp_path, model, privacy, parts=parts, max_steps=1)
    with pytest.raises(UnsupportedModelError, match="is used by an operation in the backward pass"):
        trainer.train()
    assert trainer.ledger.steps == 0
    assert distance(before, parameters(model)) == 0
