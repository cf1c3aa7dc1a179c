"""Operations that are given their arguments by name are followed as those that are given them by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.per_example.test_picked_rows_elsewhere import WIDTH, layers, marked, refused

EYE = torch.eye(WIDTH, dtype=torch.float64)


def numbers(rows: Tensor) -> Tensor:
    return torch.arange(len(rows))


def back(h: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    return (h * 0).masked_scatter_(mask=mask.bool()[..., None].expand_as(h), source=rows)[mask.bool()]


BY_NAME: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda h, rows, mask: torch.index_add(input=rows, dim=0, index=numbers(rows), source=rows),
    "of a tensor": lambda h, rows, mask: rows.index_add(dim=0, index=numbers(rows), source=rows),
    "split": lambda h, rows, mask: torch.cat(tensors=torch.split(tensor=rows, split_size_or_sections=1, dim=0), dim=0),
    "masked_scatter_": back,
    "softmax": lambda h, rows, mask: torch.softmax(input=rows, dim=1),
    "clamp": lambda h, rows, mask: torch.clamp(input=rows, min=0),
    "matmul": lambda h, rows, mask: torch.matmul(input=rows, other=EYE),
    "mm": lambda h, rows, mask: torch.mm(input=rows, mat2=EYE),
    "relu_": lambda h, rows, mask: torch.relu_(input=rows * 1),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_of_rows_that_were_picked(name: str) -> None:
    def function(m: Any, data: Any) -> Tensor:
        h, mask = m.linear(data["x"]), data["mask"]
        rows = m.other(BY_NAME[name](h, h[mask.bool()], mask)).square().sum(1)
        owners = torch.arange(len(mask))[:, None].expand_as(mask)[mask.bool()]
        return h.sum((1, 2)) + torch.zeros(len(mask), dtype=rows.dtype).index_add(0, owners, rows)

    assert refused(function, marked(2, 1, 3), [marked(2, 1, 3), marked(1, 2), marked(3, 1, 1)], **layers()) == 0


@pytest.mark.parametrize("turn", [lambda h: torch.flip(input=h, dims=[0]), lambda h: torch.roll(input=h, shifts=1)])
def test_of_rows_that_are_turned_round(turn: Callable[[Tensor], Tensor]) -> None:
    def function(m: Any, data: Any) -> Tensor:
        return m.linear(data["x"]).sum((1, 2)) + m.other(turn(data["x"].sin())).square().sum((1, 2))  # type: ignore[no-any-return]

    assert refused(function, marked(2, 1, 3), [marked(1, 2)], **layers()) == 1
