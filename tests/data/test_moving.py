"""A batch goes to the device of the model, and on a GPU nobody waits for it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hf_dp.data.moving import moved


def test_tensors_in_whatever_they_lie_in_are_moved() -> None:
    batch = {"x": torch.ones(2), "pair": [torch.ones(1), torch.zeros(1)], "n": 3}
    found = moved(batch, torch.device("meta"))
    assert [found["x"].device.type, *(value.device.type for value in found["pair"]), found["n"]] == ["meta"] * 3 + [3]


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("cpu", True), ("mps", True)])
def test_nobody_waits_for_a_gpu(device: str, waits: bool) -> None:
    given: list[Any] = []

    def to(tensor: Tensor, where: torch.device, non_blocking: bool = False) -> Tensor:
        given.append((where.type, not non_blocking))
        return tensor

    with patch.object(Tensor, "to", to):
        moved({"x": torch.ones(2)}, torch.device(device))
    assert given == [(device, waits)]
