"""What an example adds follows from it alone, also where its gradient nearly cancels and its form is up to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.accounting import FlatClipping
from hf_dp.accounting.terms import TERMS
from hf_dp.clipping.table import rule_of
from hf_dp.losses import per_example_losses
from hf_dp.per_example import Certificate, Outer, PerExample, PerExampleGradients, preflight, record
from hf_dp.per_example.batch import Batch
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.step.clipped_sum import ClippedSum
from tests.zoo import tiny

# Of so many positions a weight (WIDTH, WIDTH) is instantiated.
WIDTH, LONG = 64, 40


class Linear(nn.Module):
    """One weight, and a bias or a weight on each feature."""

    def __init__(self, bias: bool = False, scaled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out if self.scale is None else out * self.scale


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """Linear in the outputs: their gradients are the `weights`."""
    each: Tensor = (model(batch["x"]) * batch["weights"]).sum((1, 2))
    return each


def cancelling(size: float, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two positions of which the second takes away all but a `share` of what the first gives."""
    x, weight = (torch.randn(WIDTH, generator=generator) * size for _ in range(2))
    return torch.stack([x, x]), torch.stack([weight, -weight * (1 - share)])


def batch_of(examples: Sequence[tuple[Tensor, Tensor]], positions: int) -> dict[str, Tensor]:
    def padded(sides: Sequence[Tensor]) -> Tensor:
        return torch.stack([nn.functional.pad(side, (0, 0, 0, positions - len(side))) for side in sides])

    x, weights = zip(*examples, strict=True)
    return {"x": padded(x), "weights": padded(weights)}


@pytest.fixture(scope="module")
def certificates() -> Callable[[Any], Certificate]:
    known: dict[str, Certificate] = {}

    def of(model: Any) -> Certificate:
        x, weights = (torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
        names = " ".join(name for name, _ in model.named_parameters())
        if names not in known:
            known[names] = preflight(model, losses, {"x": x, "weights": weights})
        return known[names]

    return of


Recorded = Callable[[Any, dict[str, Tensor], Certificate], PerExampleGradients]


def in_one_pass(model: Any, batch: dict[str, Tensor], certificate: Certificate) -> PerExampleGradients:
    return record(model, losses, batch, certificate=certificate)


def in_two_passes(model: Any, batch: dict[str, Tensor], certificate: Certificate) -> PerExampleGradients:
    return record_in_two_passes(model, losses, batch, certificate=certificate)


def clipped(
    model: Any, batch: dict[str, Tensor], certificate: Certificate, recorded: Recorded = in_one_pass
) -> dict[str, Tensor]:
    total = ClippedSum(model, rule_of(FlatClipping(norm=1.0)))
    total.add(recorded(model, batch, certificate))
    return {name: value.double().clone() for name, value in total.gradients.items()}


def moved(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm())


BESIDE = {
    "longer": (LONG, lambda rows: rows),
    "as wide, at all positions": (LONG, lambda rows: rows),
    "not a number": (LONG, lambda rows: rows * torch.nan),
    "large": (LONG, lambda rows: rows * 2.0**21),
}
SIZES = [(1.0, 1e-3), (1e2, 1e-4), (1e3, 1e-5), (1e6, 1e-3), (3e9, 1e-3)]


@pytest.mark.parametrize("recorded", [in_one_pass, in_two_passes])
@pytest.mark.parametrize("kind", [{}, {"bias": True}, {"scaled": True}], ids=["weight", "bias", "scaled"])
@pytest.mark.parametrize("beside", sorted(BESIDE))
def test_failure_55_one_that_joins_moves_the_sum_by_at_most_c(
    beside: str, kind: dict[str, bool], recorded: Recorded, certificates: Callable[[Any], Certificate]
) -> None:
    """The gradients of 32 examples nearly cancel, and are kept in one form without it and in another beside it."""
    model, (positions, made) = Linear(**kind), BESIDE[beside]
    for size, share in SIZES:
        generator = torch.Generator().manual_seed(5)
        short = [cancelling(size, share, generator) for _ in range(32)]
        x, weights = (torch.randn(positions, WIDTH, generator=generator) for _ in range(2))
        width = 2 if beside == "longer" else positions
        without = clipped(model, batch_of(short, width), certificates(model), recorded)
        whole = clipped(model, batch_of([*short, (x, made(weights))], positions), certificates(model), recorded)
        bound = 0.0 if beside == "not a number" else 1.0
        # What rounding leaves of each, and of the sum.
        assert moved(whole, without) <= bound + 32 * 2**-13


def test_texts_beside_a_longer_one_add_what_they_add_without_it() -> None:
    model = tiny("gpt2", "causal_lm", torch.float32)
    ids = torch.randint(3, 25, (33, 40), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[:32, 20:], mask[:32, 20:] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.eq(0), -100)}
    short = {name: value[:32, :20] for name, value in batch.items()}
    certificate = preflight(model, per_example_losses, {name: value[:3, :17] for name, value in short.items()})

    def of_the_short(given: dict[str, Tensor]) -> dict[str, Tensor]:
        made = record(model, per_example_losses, given, certificate=certificate)
        coefficients = rule_of(FlatClipping(norm=1.0)).coefficients(made.squared_norms(), made.rounding())
        coefficients[32:] = 0.0
        return {name: value.double() for name, value in made.weighted_sum(coefficients).items()}

    assert moved(of_the_short(batch), of_the_short(short)) <= 5e-6


def test_failure_55_the_check_can_fail(
    monkeypatch: pytest.MonkeyPatch, certificates: Callable[[Any], Certificate]
) -> None:
    """With bounds of their own in each form."""
    settled = Outer.settled

    def forgetting(outer: Outer) -> Outer | PerExample:
        found = settled(outer)
        return replace(found, lengths=None) if isinstance(found, PerExample) else found

    monkeypatch.setattr(Outer, "settled", forgetting)
    model, generator = Linear(), torch.Generator().manual_seed(5)
    short = [cancelling(1e3, 1e-5, generator) for _ in range(32)]
    long = (torch.randn(LONG, WIDTH), torch.randn(LONG, WIDTH))
    without = clipped(model, batch_of(short, 2), certificates(model))
    whole = clipped(model, batch_of([*short, long], LONG), certificates(model))
    assert moved(whole, without) > 3


@pytest.mark.parametrize("size", [4, 32])
def test_failure_55_a_unit_of_more_rows_moves_the_sum_by_at_most_c(
    size: int, certificates: Callable[[Any], Certificate]
) -> None:
    """Rows of one unit are positions of it, and those of the longest decide in which form all are kept."""
    model, generator = Linear(), torch.Generator().manual_seed(5)

    def total(units: list[list[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
        rows = [row for unit in units for row in unit]
        owners = [number for number, unit in enumerate(units) for _ in unit]
        return clipped(
            model, batch_of(rows, 1), certificates(model), lambda *given: in_one_pass(*given).grouped(owners)
        )

    def split(example: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(x[None], weight[None]) for x, weight in zip(*example, strict=True)]

    short = [split(cancelling(1e3, 1e-5, generator)) for _ in range(size)]
    long = split((torch.randn(LONG, WIDTH), torch.randn(LONG, WIDTH)))
    assert moved(total([*short, long]), total(short)) <= 1 + size * 2**-13


def test_failure_55_by_groups(certificates: Callable[[Any], Certificate]) -> None:
    model, generator = Linear(bias=True), torch.Generator().manual_seed(5)
    short = [cancelling(1e3, 1e-5, generator) for _ in range(32)]
    long = (torch.randn(LONG, WIDTH), torch.randn(LONG, WIDTH))

    def total(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        made = ClippedSum(model, rule_of(TERMS["clipping"]["groups"](norm=1.0, groups={"*weight": 1, "*": 1})))
        made.add(InGroups(model, losses, batch, certificate=certificates(model)))
        return {name: value.double().clone() for name, value in made.gradients.items()}

    assert moved(total(batch_of([*short, long], LONG)), total(batch_of(short, 2))) <= 1 + 32 * 2**-13
