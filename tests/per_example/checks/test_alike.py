"""What a batch writes before it reads it: whether losses follow from it is asked of rows that do not write it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.per_example.checks.kept import Memory
from tests.per_example.checks.test_memory import FEATURES, Plain


def memory_of(model: nn.Module) -> Memory:
    return Memory(model, lambda given: model(given["x"]).sum(1))


class Large(Plain):
    """Which rows are so large that a pass notes it, before anything is computed."""

    was_large, factor = False, 2.0

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.detach().abs().max() > 100):
            self.was_large = True
        return super().forward(x * (self.factor if self.was_large else 1.0))


class LargeUnread(Large):
    """Notes it, and follows nothing from it."""

    factor = 1.0


def rows_of(*sizes: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return {"x": torch.randn(len(sizes), FEATURES, generator=generator) * torch.tensor(sizes)[:, None]}


def test_failure_138_what_the_rows_that_are_asked_of_write_themselves_hides_nothing() -> None:
    few, large, probe = rows_of(1, 1), rows_of(1, 1e4), rows_of(1, 1, 1e4)
    with pytest.raises(UnsupportedModelError, match="was_large keeps something of the examples"):
        memory_of(Large()).refuse(few, large, probe)
    memory_of(LargeUnread()).refuse(few, large, probe)


def test_in_a_step_neither() -> None:
    for model, is_refused in ((Large(), True), (LargeUnread(), False)):
        memory = memory_of(model)
        memory.refuse(rows_of(1, 1), rows_of(1, 2), rows_of(1, 1, 1e4))
        memory.ask_of(rows_of(1, 1, 1e4))
        try:
            with memory.unmoved():
                model(rows_of(1e4)["x"])
            found = False
        except UnsupportedModelError:
            found = True
        assert found == is_refused
