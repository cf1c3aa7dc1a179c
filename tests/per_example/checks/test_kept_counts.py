"""A number that passes count may not decide what losses are, however many there were before."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import per_example_losses
from tests.training.own_loops import begun, loop
from tests.training.workbench import classifier

WARM_UP = 20


class Counting:
    """Losses that are twice as large, once it has computed so many."""

    def __init__(self, until: int) -> None:
        self.until, self.passes = until, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.passes += 1
        return per_example_losses(model, batch) * (1 if self.passes <= self.until else 2)


def in_a_closure(until: int) -> Any:
    passes = 0

    def losses(model: nn.Module, batch: Any) -> Tensor:
        nonlocal passes
        passes += 1
        return per_example_losses(model, batch) * (1 if passes <= until else 2)

    return losses


@pytest.mark.parametrize("made", [Counting, in_a_closure])
def test_failure_125_passes_that_a_loss_counts_are_refused_where_they_decide(made: Any) -> None:
    run, optimizer, scheduler = begun(classifier(), loss=made(WARM_UP), steps=30)
    with pytest.raises(UnsupportedModelError, match=r"passes keeps something of the examples that pass"):
        loop(run, optimizer, scheduler)
    assert 0 < run.ledger.steps == run.global_step < 30


def test_passes_that_are_counted_and_told_are_welcome() -> None:
    counting = Counting(10**12)
    run, optimizer, scheduler = begun(classifier(), loss=counting, steps=4)
    loop(run, optimizer, scheduler)
    assert run.ledger.steps == 4
    assert counting.passes > 0
