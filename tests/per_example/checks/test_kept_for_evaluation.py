"""What modules compute once for evaluation, and let go of in their own `train`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example import loop, preflight, record
from tests.per_example.small import batch, relative_error, square


class Biases(nn.Module):
    """A table of positions, looked up once for evaluation, as LeViT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(9, 4))
        self.kept: dict[str, Any] = {}

    def looked_up(self) -> Tensor:
        found = self.table[torch.arange(6)]
        return found if self.training else self.kept.setdefault("cpu", found)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.looked_up()).cos()


class LetGo(Biases):
    def train(self, mode: bool = True) -> Any:
        if mode:
            self.kept = {}
        return super().train(mode)


def test_what_is_kept_for_evaluation_is_let_go_of_between_passes() -> None:
    torch.manual_seed(0)
    model, data = LetGo().double(), batch(4, 6, 4)
    certificate = preflight(model, square, batch(3, 6, 4))
    assert model.training
    assert not model.kept
    assert relative_error(record(model, square, data, certificate=certificate), loop(model, square, data)) <= 1e-12
    model.eval()
    model(data["x"]).sum().backward()  # of parameters, as anybody evaluates


def test_what_is_never_let_go_of_is_refused_and_the_way_out_works() -> None:
    with pytest.raises(UnsupportedModelError, match=r"(?s)earlier pass and kept.*module's own train\(mode\)"):
        preflight(Biases().double(), square, batch(3, 6, 4))
