"""Gram matrices: one triangle of blocks says as much as the whole."""

from __future__ import annotations

import pytest
import torch

from hf_dp.per_example.factors import Outer
from hf_dp.per_example.gram import (
    SHORT_BLOCK,
    SMALLEST_BLOCK,
    SMALLEST_ON_CORES,
    Dense,
    OneHot,
    SelfGrams,
    Side,
    gram,
    smallest_block,
)
from hf_dp.per_example.norms import squared_norms


def sides(length: int) -> dict[str, Side]:
    torch.manual_seed(0)
    return {
        "dense": Dense(torch.randn(3, length, 5, dtype=torch.float64)),
        "one-hot": OneHot(torch.randint(0, 4, (3, length)), 4),
        "not contiguous": Dense(torch.randn(length, 3, 5, dtype=torch.float64).transpose(0, 1)),
    }


@pytest.mark.parametrize("length", [1, 2, 95, 96, 97, 191, 193, 400])
@pytest.mark.parametrize("name", ["dense", "one-hot", "not contiguous"])
def test_blocks_of_one_triangle_are_enough(name: str, length: int) -> None:
    side, other = sides(length)[name], sides(length)["dense"]
    whole, against = gram(side, side).double(), gram(other, other)
    grams = SelfGrams()
    found = grams.of(side).inner(grams.of(other))
    assert torch.allclose(found, (whole * against).sum((1, 2)), rtol=1e-12)
    squares = grams.of(side).row_norms.double().square().sum(1)
    assert torch.allclose(squares, whole.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 63, 64, 67, 130])
@pytest.mark.parametrize("width", [SHORT_BLOCK, SHORT_BLOCK + 1, 5 * SHORT_BLOCK - 3])
def test_wide_rows_are_taken_in_parts_that_fit_a_cache(width: int, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    side = Dense(torch.randn(2, length, width).to(dtype))
    found, exact = SelfGrams().of(side), SelfGrams().of(Dense(side.values.double()))
    whole = (side.values.double() @ side.values.double().mT).square().sum((1, 2))
    # Squares of 16-bit numbers end in digits that are mostly rounded downwards.
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(found.inner(found).double(), whole, rtol=rtol)
    assert found.row_norms.shape == (2, length)
    assert torch.allclose(found.row_norms.double(), side.values.double().norm(dim=2), rtol=rtol)
    assert all(
        torch.allclose(one.double(), two, rtol=1e-5, atol=1e-3)
        for one, two in zip(found.blocks, exact.blocks, strict=True)
    )


@pytest.mark.parametrize("length", [64, 128, 130, 255])
def test_half_of_the_products_or_less_are_left_out(length: int) -> None:
    blocks = SelfGrams().of(sides(length)["dense"])
    entries = sum(block.numel() for block in blocks.blocks) / 3
    assert entries <= length**2 * (0.76 if length < 128 else 0.65)


@pytest.mark.parametrize("length", [511, 512, 1100])
def test_on_tensor_cores_blocks_are_larger(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both sides they are the same: of ids too, and not where one side is computed with in float32."""
    whole = Dense(torch.randn(3, length, 5))
    low, ids = Dense(whole.values.bfloat16()), sides(length)["one-hot"]
    assert smallest_block(low, low) == SMALLEST_BLOCK
    monkeypatch.setattr("hf_dp.per_example.products._has_tensor_cores", lambda device, dtype: True)
    monkeypatch.setattr("hf_dp.per_example.products._to_float32", lambda x, y: torch.bmm(x.float(), y.float()))
    assert smallest_block(low, ids) == smallest_block(low, low) == SMALLEST_ON_CORES
    assert smallest_block(low, whole) == smallest_block(whole, ids) == SMALLEST_BLOCK
    grams = SelfGrams()
    blocks = grams.of(low, SMALLEST_ON_CORES).blocks
    assert blocks[0].shape[1] in range(SMALLEST_ON_CORES, 2 * SMALLEST_ON_CORES)
    for other in (low, ids, whole):
        # One of the sides is in the grams already, in other blocks perhaps.
        norms, _ = squared_norms([Outer(other, low)], grams)
        expected = Outer(other, low).instantiated().values.double().square().sum((1, 2))
        assert torch.allclose(norms.double(), expected, rtol=1e-4)


def test_norms_of_long_sequences() -> None:
    uses = [
        Outer(sides(133)["one-hot"], sides(133)["dense"]),
        Outer(Dense(torch.randn(3, 99, 4).double()), Dense(torch.randn(3, 99, 5).double())),
    ]
    expected = sum((use.instantiated().values for use in uses), start=torch.zeros(3, 4, 5).double())
    norms, _ = squared_norms(uses)
    assert torch.allclose(norms, expected.square().sum((1, 2)), rtol=1e-12)


def test_an_input_that_two_layers_share_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *pair: products.append(1) or bmm(*pair))
    x, grams = torch.randn(3, 7, 50), SelfGrams()
    uses = [Outer(Dense(torch.randn(3, 7, 60)), Dense(x.detach())) for _ in range(2)]
    norms = [squared_norms([use], grams)[0] for use in uses]
    assert len(products) == 3
    assert all(
        torch.allclose(n, u.instantiated().values.square().sum((1, 2)), rtol=1e-4)
        for n, u in zip(norms, uses, strict=True)
    )
