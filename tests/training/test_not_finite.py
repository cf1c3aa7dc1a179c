"""A loss or a pixel that is not finite ruins one example only, and no clipping norm lets a step out of bounds."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp import DPTrainer
from hf_dp.per_example import padded
from tests.training.workbench import (
    EXPECTED,
    ROWS,
    classifier,
    distance,
    draws,
    flat,
    gradients_of,
    last_log,
    make,
    private,
    rows,
)
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")


class OneLossIsNan(DPTrainer):
    """The example whose first token is 3 has no finite loss."""

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = super().compute_per_example_loss(model, inputs)
        bad = inputs["input_ids"][:, 0].eq(3)
        return losses * torch.where(bad, math.nan, 1.0)


def with_one_bad_row() -> list[dict[str, Any]]:
    data = [row for row in rows(200) if row["input_ids"][0] != 3][: ROWS - 1]
    return [*data, {"input_ids": [3, 4, 5], "labels": 0}]


@pytest.mark.parametrize("withhold", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_failure_14_an_example_without_a_finite_loss_contributes_nothing(tmp_path: Path, withhold: bool) -> None:
    bad, everything = with_one_bad_row(), {"per_device_train_batch_size": ROWS // 4, "gradient_accumulation_steps": 4}
    everything["logging_steps"] = 1
    model = classifier()
    config = private(withhold_non_private_logs=withhold)
    trainer = make(tmp_path, model, config, OneLossIsNan, {"train_dataset": bad}, max_steps=2, **everything)
    gradients = gradients_of(trainer)
    assert all(torch.isfinite(p).all() for p in model.parameters())

    class LossIsZero(DPTrainer):
        def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            losses = super().compute_per_example_loss(model, inputs)
            return losses * inputs["input_ids"][:, 0].ne(3)

    reference = gradients_of(
        make(tmp_path, classifier(), config, LossIsZero, {"train_dataset": bad}, max_steps=2, **everything)
    )
    for found, expected in zip(gradients, reference, strict=True):
        assert distance(found, expected) < 1e-6
    history = json.dumps(trainer.state.log_history)
    if withhold:
        assert "non_finite" not in history
    else:
        assert [entry["non_finite_examples"] for entry in trainer.state.log_history if "loss" in entry] == [1, 1]
        assert "NaN" not in history


class Spreading(TorchDispatchMode):
    """Products as of kernels that load whole tiles: behind a row that fills none stand the next one's numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and output.dtype == torch.bfloat16:
            rows = args[-2]
            if rows.shape[1] % 32:
                output[:-1] += (rows[1:, :1] * 0).to(output.dtype)
        return output


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"passes": 2}, marks=pytest.mark.slow),
        pytest.param({"clipping": "groups", "groups": {"*bias": 1, "*": 1}}, marks=pytest.mark.slow),
    ],
)
def test_failure_161_nor_what_is_not_finite_in_the_next_row(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded, "_cpu_reads_so", lambda: True)
    options = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1, "logging_steps": 1, "bf16": True}
    config, parts = private(noise_multiplier=0, **changes), {"train_dataset": with_one_bad_row()}
    found = []
    for mode in (Spreading(), nullcontext()):
        trainer = make(tmp_path, classifier(), config, OneLossIsNan, parts, max_steps=2, **options)
        with mode:
            found.append(gradients_of(trainer))
        assert [entry["non_finite_examples"] for entry in trainer.state.log_history if "loss" in entry] == [1, 1]
    for one, other in zip(*found, strict=True):
        assert distance(one, other) < 1e-3


@pytest.mark.slow
def test_failure_14_a_nan_pixel_ruins_one_example_only(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = [
        {"pixel_values": torch.randn(3, 12, 12, generator=generator), "labels": i % 3} for i in range(12)
    ]  # fmt: skip
    images[5]["pixel_values"][0, 0, 0] = math.nan
    model = tiny("vit", "image", torch.float32, num_hidden_layers=1)
    trainer = make(
        tmp_path, model, parts={"train_dataset": images, "data_collator": None}, max_steps=2, logging_steps=1,
        per_device_train_batch_size=6, gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert last_log(trainer, "loss") > 0
    assert [entry["non_finite_examples"] for entry in trainer.state.log_history if "loss" in entry] == [1, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e6])
def test_any_clipping_norm_bounds_the_step(tmp_path: Path, norm: float) -> None:
    with pytest.warns(UserWarning, match="not private"):
        config = private(noise_multiplier=0, clipping_norm=norm)
    gradients = gradients_of(make(tmp_path, privacy=config, learning_rate=0.0))
    for gradient, batch in zip(gradients, draws(7), strict=True):
        assert float(flat(gradient).double().norm()) <= norm * len(batch) / EXPECTED * (1 + 1e-6)


class TellingItsMean(DPTrainer):
    """It keeps the mean of its losses, and how many micro-batches had none."""

    mean, without = 0.0, 0

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        losses = super().compute_per_example_loss(model, inputs)
        self.without += not losses.isfinite().all()
        self.mean += 0.1 * (float(losses.detach().mean()) - self.mean)
        if self.without > 1 or not math.isfinite(self.mean):
            raise FloatingPointError("it diverges")
        return losses


def test_what_the_check_shows_a_loss_that_is_no_number_does_not_stay_in_what_it_tells(tmp_path: Path) -> None:
    trainer = make(tmp_path, classifier(), kind=TellingItsMean, max_steps=1)
    trainer.train()
    assert trainer.without == 0
    assert 0 < trainer.mean < 9
