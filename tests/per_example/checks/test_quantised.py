"""Adapters over frozen layers in few bits: exact against loops, one over whole weights among them, or refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp import DPTrainer
from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import per_example_losses
from hf_dp.per_example import preflight
from hf_dp.per_example.checks.preflight import check_modules
from scripts import coverage
from tests import low_bits, zoo
from tests.training.workbench import make

KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not low_bits.is_there(kind), reason=f"no {package} here"))
    for kind, (package, _) in low_bits.KINDS.items()
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_few_bits(kind: str) -> None:
    found = coverage.judge_quantised(kind)
    assert found.startswith("refused" if kind in low_bits.REFUSED else "exact"), found


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_an_outlier_of_one_example_moves_the_others_where_it_is_refused(training: bool) -> None:
    """On a GPU in training too; on a CPU training dequantises the weights."""
    library = pytest.importorskip("bitsandbytes")
    for threshold in (6.0, 0.0):
        torch.manual_seed(0)
        layer = library.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False, threshold=threshold)
        layer.weight = library.nn.Int8Params(torch.randn(32, 64), requires_grad=False, has_fp16_weights=False)
        layer.to("cpu").train(training)
        given = torch.randn(2, 64)
        beside = given.clone()
        beside[1, 3] = 20.0
        moved = float((layer(given)[0] - layer(beside)[0]).abs().max())
        assert (moved > 1e-5) == (threshold > 0 and not training)


class Linear8bitLt(nn.Linear):
    """Has the name of bitsandbytes' layer, and its state."""

    def __init__(self, threshold: float) -> None:
        super().__init__(2, 2)
        self.state = SimpleNamespace(threshold=threshold)


def test_failure_37_outliers_of_a_batch_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"(?s)1 computes in 8 bits.*llm_int8_threshold=0\.0"):
        check_modules(nn.Sequential(nn.Linear(2, 2), Linear8bitLt(6.0)))
    check_modules(nn.Sequential(nn.Linear(2, 2), Linear8bitLt(0.0)))


def test_failure_37_a_teacher_in_8_bits(tmp_path: Path) -> None:
    class Taught(DPTrainer):
        teacher = nn.Sequential(Linear8bitLt(6.0))

        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            raise NotImplementedError

    with pytest.raises(UnsupportedModelError, match=r"Taught\.teacher\.0 computes in 8 bits, but for outliers"):
        make(tmp_path, kind=Taught).train()


def test_weights_are_not_repacked_in_evaluations() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].support_avx512bf16_for_cpu = True
    check_modules(model)
    assert model[1].support_avx512bf16_for_cpu is False
    assert "support_avx512bf16_for_cpu" not in vars(model[0])


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_frozen_layer_that_cuts_the_gradient_off_is_refused(is_cut: bool) -> None:
    model: Any = zoo.adapted("LoRA", torch.float32)
    layer = model.base_model.model.model.layers[-1].mlp.down_proj.base_layer
    forward = layer.forward

    def cutting(given: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = forward(given)
        return found

    if not is_cut:
        preflight(model, per_example_losses, zoo.text_batch("causal_lm", 3, 7, torch.float32))
        return
    layer.forward = cutting
    with pytest.raises(UnsupportedModelError, match=r"down_proj\.base_layer \(Linear\) gives its input no gradient"):
        preflight(model, per_example_losses, zoo.text_batch("causal_lm", 3, 7, torch.float32))


@pytest.mark.slow
def test_a_reentrant_checkpoint_that_begins_with_an_adapter_cuts_nothing_off() -> None:
    """It computes without gradients first, from an input that needs one."""
    model: Any = zoo.adapted("LoRA, bias='lora_only'")
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    preflight(model, per_example_losses, zoo.text_batch("masked_lm"))
