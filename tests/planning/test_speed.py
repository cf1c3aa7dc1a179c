"""The time of a private step on a GPU, by arithmetic."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dp.cli.size import speed_in_words
from hf_dp.per_example import Dense, Outer, products
from hf_dp.per_example.chosen import Chosen
from hf_dp.per_example.norms import squared_norms
from hf_dp.planning import speed
from hf_dp.planning.sized import ModelSize, Parameter
from hf_dp.planning.speed import GPUS, Gpu, busy_from, predicted_ratio
from scripts.workloads import Counting
from tests.per_example.pretended import dense

WIDE = ModelSize((Parameter((8192, 2048), trained=True, unit=""),))
# Nothing is limited by memory, nor by products of float32 numbers.
IDEAL = Gpu(low=1.0, full=1.0, bandwidth=float("inf"))


def ratio(model: ModelSize, gpu: Gpu = IDEAL, **changes: Any) -> float:
    return predicted_ratio(model, gpu, **{"length": 16, "micro_batch": 8, **changes})


def test_of_products_alone() -> None:
    """Three products; and the private step two of them, the norm, and the sum, twice where factors are split."""
    of_norm = 16 * (8192 + 2048) / (8192 * 2048)
    assert ratio(WIDE) == pytest.approx((2 + 2 + of_norm) / 3)
    assert ratio(WIDE, bytes_computed=4) == pytest.approx((2 + 1 + of_norm) / 3)
    assert ratio(WIDE, checkpointing=True) == pytest.approx((3 + 2 + of_norm) / 4)
    # Instantiated and kept: one product more than none.
    assert ratio(WIDE, length=4096) == pytest.approx(1)


def test_frozen_weights_cost_both_the_same() -> None:
    frozen = Parameter((2048, 2048), trained=False, unit="")
    adapters = (Parameter((8, 2048), trained=True, unit=""), Parameter((2048, 8), trained=True, unit=""))
    lora = ModelSize((frozen, *adapters))
    assert 1 < ratio(lora, GPUS["H100"], length=512) < 1.05
    assert ratio(ModelSize((frozen,)), GPUS["H100"]) == 1
    assert ratio(WIDE, GPUS["H100"], length=512, micro_batches=4) > 1.2


def test_a_tied_table_has_a_product_for_its_other_use() -> None:
    looked_up = Parameter((1000, 64), trained=True, unit="", is_embedding=True)
    tied = Parameter((1000, 64), trained=True, unit="", is_embedding=True, uses=2)
    assert ratio(ModelSize((WIDE.parameters[0], tied))) > ratio(ModelSize((WIDE.parameters[0], looked_up)))


def test_a_single_number_is_a_parameter_too() -> None:
    """CLIP's temperature."""
    scale = Parameter((), trained=True, unit="")
    assert ratio(ModelSize((*WIDE.parameters, scale))) == pytest.approx(ratio(WIDE))


def test_more_micro_batches_hide_the_noise() -> None:
    assert ratio(WIDE, GPUS["H100"], micro_batches=16) < ratio(WIDE, GPUS["H100"])


_SHAPES = (
    (512, 8192, 2048), (2048, 6144, 2048), (2048, 11008, 4096), (256, 768, 3072), (95, 700, 900), (1024, 2048, 2048),
    (9000, 64, 96),
)  # fmt: skip


def test_short_micro_batches_wait_for_the_host() -> None:
    """As measured on an H200 (docs/benchmarks_gpu.md): short are 4 x 1024 in full and 8 x 512 with LoRA."""
    layers, width, inner = 16, 2048, 8192
    shapes = [(width, width)] * 2 + [(512, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
    table = Parameter((128256, width), trained=True, unit="", is_embedding=True, uses=2)
    norms = [Parameter((width,), trained=True, unit="")] * (2 * layers + 1)
    full = ModelSize((table, *norms, *(Parameter(shape, trained=True, unit="") for shape in shapes * layers)))
    assert 4 < busy_from(full, GPUS["H100"], length=1024) <= 8
    adapters = [Parameter(side, trained=True, unit="") for p, d in shapes * layers for side in ((16, d), (p, 16))]
    lora = ModelSize((*(replace(p, trained=False) for p in full.parameters), *adapters))
    assert 8 < busy_from(lora, GPUS["H100"], length=512) <= 32
    assert busy_from(lora, GPUS["H100"], length=1024) < busy_from(lora, GPUS["H100"], length=512)
    assert busy_from(full, IDEAL, length=1) == 1
    assert "fewer" not in speed_in_words({"H100": 1.2}, {"H100": 1})
    assert busy_from(full, Gpu(low=1e30, full=1.0, bandwidth=float("inf")), length=1) == 1 << 12


@pytest.mark.parametrize("examples", [8, 1])
@pytest.mark.parametrize(("length", "p", "d"), _SHAPES)
def test_bytes_are_those_that_are_moved(
    examples: int, length: int, p: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_has_tensor_cores", "_adds_in_place"):
        monkeypatch.setattr(products, name, lambda device, *_: True)

    def added(out: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        # Of what adds to sums in float32 as it multiplies there is nothing without a GPU; as many bytes are moved here.
        try:
            (torch.bmm if out.dim() == 3 else torch.mm)(left, right, out_dtype=torch.float32, out=out)
        except NotImplementedError:
            pytest.skip("torch 2.11 does not know the shape of such a product of batches")

    monkeypatch.setattr(products, "_add_in_place", added)
    monkeypatch.setattr("hf_dp.per_example.chosen._BY_INDEX", {"meta"})
    monkeypatch.setattr("hf_dp.per_example.chosen._sparse", dense)
    # Autocast knows no meta device.
    monkeypatch.setattr("hf_dp.per_example.chosen.full_precision", lambda device: nullcontext())
    sides = [torch.empty(examples, length, width, dtype=torch.bfloat16, device="meta") for width in (p, d)]
    weights = torch.empty(examples, device="meta")
    total = torch.empty(p, d, device="meta")
    with Counting() as counting:
        use = Outer(Dense(sides[0]), Dense(sides[1])).settled()
        squared_norms([use])
        use.masked(Chosen(weights)).add_weighted_(total, weights)
    expected = speed._factors(Parameter((p, d), trained=True, unit=""), examples, length, 2)
    assert counting.bytes == pytest.approx(expected.moved, rel=0.15)
    assert counting.operations == pytest.approx(expected.operations, rel=0.02)
