"""What an example adds follows from it alone, also where two uses of one parameter nearly cancel one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.accounting import FlatClipping
from hf_dp.clipping.table import rule_of
from hf_dp.per_example import Outer, PerExample, PerExampleGradients, preflight, record
from hf_dp.per_example.batch import Batch
from tests.step.test_beside_others import LONG, WIDTH, batch_of


class Tied(nn.Module):
    """A weight that is multiplied with, and whose first row is looked up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.zeros(x.shape[:2], dtype=torch.int64)
        return nn.functional.linear(x, self.weight), nn.functional.embedding(first, self.weight)


def tied_losses(model: nn.Module, batch: Batch) -> Tensor:
    product, found = model(batch["x"])
    each: Tensor = (product * batch["weights"] + found * batch["looked_up"]).sum((1, 2))
    return each


def tied_batch(examples: Sequence[tuple[Tensor, Tensor, Tensor]], positions: int) -> dict[str, Tensor]:
    data = batch_of([(x, weights) for x, weights, _ in examples], positions)
    return {**data, "looked_up": batch_of([(rows, rows) for *_, rows in examples], positions)["x"]}


def of_tied(positions: int, *several: tuple[Tensor, Tensor, Tensor]) -> PerExampleGradients:
    model = Tied()
    certificate = preflight(model, tied_losses, tied_batch(list(torch.randn(4, 3, 5, WIDTH)), 5))
    return record(model, tied_losses, tied_batch(several, positions), certificate=certificate)


def differing_uses(size: float, share: float) -> float:
    """How much the coefficients of 32 examples are others beside one that is longer, of which each nearly takes away
    what it adds to the first row by a product where that is looked up."""
    generator, short = torch.Generator().manual_seed(5), []
    for _ in range(32):
        x, weights = torch.randn(2, WIDTH, generator=generator) * size, torch.zeros(2, WIDTH)
        weights[:, 0] = torch.rand(2, generator=generator)
        short.append((x, weights, -weights[:, :1] * x * (1 - share)))
    x, weights, rows = torch.randn(3, LONG, WIDTH, generator=generator)
    without, beside = of_tied(2, *short), of_tied(LONG, *short, (x, weights, rows))
    kept = [[isinstance(use, PerExample) for use in made.factors["weight"]] for made in (without, beside)]
    assert list(map(any, kept)) == [False, True]
    one, other = (
        rule_of(FlatClipping(norm=1e-3)).coefficients(made.squared_norms(), made.rounding())
        for made in (without, beside)
    )
    return float((other[:32] / one - 1).abs().max())


@pytest.mark.parametrize(("size", "share"), [(1.0, 1e-3), (1e2, 1e-4), (1e3, 1e-5)])
def test_failure_55_uses_that_cancel_have_the_same_coefficients_in_each_form(size: float, share: float) -> None:
    assert differing_uses(size, share) <= 1e-5


def test_failure_55_the_check_of_uses_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is taken in float64."""
    monkeypatch.setattr("hf_dp.per_example.norms._refined", lambda uses, norms, bound: norms)
    assert differing_uses(1e2, 1e-4) > 1e-3


def test_what_does_not_cancel_between_uses_is_not_made_again_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many positions the bound on rounding is far above what there is; what is kept is what is summed."""

    def refuse(use: Any) -> Any:
        pytest.fail("again in float64")

    for kind in (Outer, PerExample):
        monkeypatch.setattr(kind, "in_float64", refuse)
    made = of_tied(2000, *torch.randn(2, 3, 2000, WIDTH, generator=torch.Generator().manual_seed(5)))
    assert bool(made.squared_norms().isfinite().all())
