"""What has no number in float64 is no proof that float32 found rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import PreflightError
from hf_dp.per_example import preflight
from hf_dp.per_example.checks.padding import check_padding
from hf_dp.per_example.checks.strangers import check_strangers

_MEAN = {"alone": lambda x, h: h.mean(1), "mixing": lambda x, h: h.mean(1) + 1e-2 * h.mean((0, 1))}


class Masking(nn.Module):
    """Adds the smallest number of its dtype, times 0, to a tensor of float32, as a mask may: -inf x 0 in float64."""

    def __init__(self, pooled: Callable[[Tensor, Tensor], Tensor], has_mask: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.pooled, self.has_mask = pooled, has_mask

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.has_mask:
            h = h + (torch.ones(h.shape) * torch.finfo(h.dtype).min * 0).to(h)
        scores: Tensor = self.last(self.pooled(x, h))[:, 0]
        return scores


def losses(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = model(batch["x"])
    return found.square()


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    return {"x": nn.utils.rnn.pad_sequence(rows, batch_first=True)}


def by_one(x: Tensor, h: Tensor) -> Tensor:
    return h.mean(1) * (0.5 if bool((x.abs() > 50).any()) else 1.0)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("check", ["padding", "strangers", "preflight"])
def test_failure_91_what_moves_in_float32_and_is_no_number_in_float64(check: str, has_mask: bool) -> None:
    torch.manual_seed(0)
    batch, rows = {"x": torch.randn(4, 3, 4)}, [torch.randn(n, 4) for n in (3, 5, 6)]
    if check == "padding":
        with pytest.raises(PreflightError, match="moves by"):
            check_padding(Masking(_MEAN["alone"], has_mask), losses, rows, collate)
    elif check == "strangers":
        model = Masking(by_one, has_mask)
        certificate = preflight(model, losses, batch)
        with pytest.raises(PreflightError, match="is another with large numbers in 'x'"):
            check_strangers(model, losses, batch, certificate=certificate)
    else:
        with pytest.raises(PreflightError, match="depends on its neighbours"):
            preflight(Masking(_MEAN["mixing"], has_mask), losses, batch)


def test_nothing_is_refused_for_having_no_number_in_float64() -> None:
    torch.manual_seed(0)
    model, batch = Masking(_MEAN["alone"], True), {"x": torch.randn(4, 3, 4)}
    certificate = preflight(model, losses, batch)
    check_strangers(model, losses, batch, certificate=certificate)
    assert all(norm > 0 for norm in check_padding(model, losses, list(batch["x"]), collate, certificate=certificate))
