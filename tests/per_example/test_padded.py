"""Products of which each row is filled up to whole tiles are the same, and of no row is the next one read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.per_example.padded import each_row_by_itself

PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda rows, matrix: rows @ matrix,
    "linear": lambda rows, matrix: torch.nn.functional.linear(rows, matrix.T.contiguous(), matrix[0]),
    "mv": lambda rows, matrix: rows @ matrix[:, 0],
    "addmv": lambda rows, matrix: torch.addmv(rows[:, 0], rows, matrix[:, 0]),
    "bmm": lambda rows, matrix: torch.bmm(rows[None], matrix[None])[0],
    "baddbmm": lambda rows, matrix: torch.baddbmm(matrix[:1, None], rows[None], matrix[None])[0],
    "grouped": lambda rows, matrix: torch._grouped_mm(
        rows, torch.stack([matrix, 2 * matrix]), offs=torch.tensor([len(rows) // 2, len(rows)], dtype=torch.int32)
    ),
    "grouped, of rows": lambda rows, matrix: torch._grouped_mm(
        rows, matrix, offs=torch.tensor([8, rows.shape[1]], dtype=torch.int32)
    ),
}


class Widths(TorchDispatchMode):
    """How long the sums are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.endswith(("mm", "mv")):
            self.seen.append(
                [a for a in args if isinstance(a, Tensor)][-2 if "group" not in str(func) else 0].shape[-1]
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", [8, 32, 40, 72])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_are_the_same(kind: str, width: int) -> None:
    torch.manual_seed(0)
    rows, matrix = torch.randn(33, width).bfloat16(), torch.randn(width, 64).bfloat16()
    with torch.autocast("cpu", enabled=False):
        expected = PRODUCTS[kind](rows, matrix)
        with Widths() as widths, each_row_by_itself():
            found = PRODUCTS[kind](rows, matrix)
    assert torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert widths.seen == [width if kind == "grouped, of rows" else -(-width // 32) * 32]


@pytest.mark.parametrize("width", [3, 33, 37, 100, 129])
@pytest.mark.parametrize("kind", ["mm", "linear", "mv", "addmv", "bmm", "baddbmm"])
def test_what_is_not_finite_stays_in_its_row(kind: str, width: int) -> None:
    """On machines whose kernels read so and on others."""
    rows, matrix = torch.ones(33, width).bfloat16(), torch.ones(width, 64).bfloat16()
    rows[16] = torch.nan
    with each_row_by_itself():
        found = PRODUCTS[kind](rows, matrix)
    assert found.view(33, -1).isfinite().all(1).tolist() == [i != 16 for i in range(33)]


def test_other_numbers_are_left_as_they_are() -> None:
    with Widths() as widths, each_row_by_itself():
        torch.ones(5, 3) @ torch.ones(3, 4)
    assert widths.seen == [3]
