"""What an example adds follows from it alone, also where its gradient nearly cancels and its form is up to others."""

from __future__ import annotations

import functools
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
from hf_dp.per_example import Certificate, Outer, PerExample, PerExampleGradients, Pieces, preflight, record
from hf_dp.per_example.batch import Batch
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.step.clipped_sum import ClippedSum
from tests.zoo import tiny

# Of so many positions a weight (WIDTH, WIDTH) is instantiated.
WIDTH, LONG = 64, 40


class Doubled(nn.Module):
    """A float32 weight in a float64 operation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.weight = kind, nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "embedding":
            return nn.functional.embedding(x, self.weight.double())
        return nn.functional.linear(x.double(), self.weight.double())


class Linear(nn.Module):
    """One weight, or a frozen one, and a bias or what is multiplied or added."""

    def __init__(self, bias: bool = False, scale: tuple[int, ...] | None = None, constant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.scale = None if scale is None else nn.Parameter(torch.ones(scale))
        self.shift = nn.Parameter(torch.zeros(WIDTH)) if constant else None
        self.inner.weight.requires_grad_(scale is None and not constant)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        out = out if self.shift is None else out + torch.tanh(self.shift)
        return out if self.scale is None else out * self.scale


class Elementwise(nn.Module):
    """A parameter in an operation without a rule of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.weight = kind, nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "taken away":
                return x - self.weight
            case "taken from":
                return self.weight - x
            case "divided by":
                return x / self.weight
        return torch.where(x[..., :1] > 1e30, x, self.weight)


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
        names = " ".join(f"{name} {p.shape} {p.requires_grad}" for name, p in model.named_parameters())
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
KINDS: dict[str, dict[str, Any]] = {
    "weight": {},
    "bias": {"bias": True},
    "a number": {"scale": ()},
    "of shape (1,)": {"scale": (1,)},
    "for each feature": {"scale": (WIDTH,)},
    "of shape (1, 1, n)": {"scale": (1, 1, WIDTH)},
    "a constant": {"constant": True},
}
SIZES = [(1.0, 1e-3), (1e2, 1e-4), (1e3, 1e-5), (1e6, 1e-3), (3e9, 1e-3)]


@pytest.mark.few(30)
@pytest.mark.parametrize("recorded", [in_one_pass, in_two_passes])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("beside", sorted(BESIDE))
def test_failure_55_one_that_joins_moves_the_sum_by_at_most_c(
    beside: str, kind: dict[str, Any], recorded: Recorded, certificates: Callable[[Any], Certificate]
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


@pytest.mark.parametrize(("width", "positions"), [(64, 40), (512, 200)])
def test_failure_162_what_lies_far_apart_adds_the_same_where_nobody_has_a_gradient_between(
    width: int, positions: int
) -> None:
    """Without the others, positions between the first and the last are left out."""
    model, generator = nn.Linear(width, width, bias=False), torch.Generator().manual_seed(5)
    for share in (1e-1, 1e-2, 1e-3):
        x, weights = torch.randn(2, 5, positions, width, generator=generator)
        weights[0, 1:-1] = 0
        x[0, -1], weights[0, -1] = x[0, 0], -weights[0, 0] * (1 - share)
        both = {"x": x, "weights": weights}
        certificate = preflight(model, losses, both)
        found = []
        for batch in (both, {name: value[:1] for name, value in both.items()}):
            made = record(model, losses, batch, certificate=certificate)
            found.append(rule_of(FlatClipping(norm=1.0)).coefficients(made.squared_norms(), made.rounding())[0])
        torch.testing.assert_close(*found, rtol=2**-13, atol=0)


@pytest.mark.parametrize("kind", ["taken away", "taken from", "divided by", "where"])
def test_failure_55_sums_over_positions_of_copies(kind: str) -> None:
    """Padded on the left, what is added up begins elsewhere."""
    model = Elementwise(kind)
    x, weights = torch.randn(2, 4, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    certificate = preflight(model, losses, {"x": x, "weights": weights})

    def on_the_left(examples: Sequence[tuple[Tensor, Tensor]], positions: int) -> dict[str, Tensor]:
        flipped = [(x.flip(0), weight.flip(0)) for x, weight in examples]
        return {name: value.flip(1) for name, value in batch_of(flipped, positions).items()}

    generator, short = torch.Generator().manual_seed(5), []
    for _ in range(32):
        x = torch.randn(1, WIDTH, generator=generator).expand(20, WIDTH) * 1e3
        weights = torch.randn(20, WIDTH, generator=generator) * 1e3
        weights[-1] = -weights[:-1].sum(0) * (1 - 1e-6)
        short.append((x, weights))
    for positions in (40, 43, 61):
        long = torch.randn(positions, WIDTH), torch.randn(positions, WIDTH)
        without = clipped(model, on_the_left(short, 20), certificate)
        assert moved(clipped(model, on_the_left([*short, long], positions), certificate), without) <= 1 + 32 * 2**-13


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


def test_failure_55_a_unit_in_pieces_adds_what_it_adds_whole(certificates: Callable[[Any], Certificate]) -> None:
    """Whether rows of a unit share a micro-batch is up to the others."""
    model = Linear(bias=True)
    for size, share in SIZES:
        x, weights = cancelling(size, share, torch.Generator().manual_seed(5))
        rows = [batch_of([(x[None, k], weights[None, k])], 1) for k in (0, 1)]
        whole = clipped(
            model, batch_of([(x[None, k], weights[None, k]) for k in (0, 1)], 1), certificates(model),
            lambda *given: in_one_pass(*given).grouped([0, 0]),
        )  # fmt: skip
        for passes in (1, 2):
            total, pieces = ClippedSum(model, rule_of(FlatClipping(norm=1.0))), Pieces()
            for k, row in enumerate(rows):
                one = functools.partial(record_in_two_passes, owners=([0], k, 1 - k)) if passes == 2 else record
                found = one(model, losses, row, certificate=certificates(model))
                total.add(pieces.joined(found if passes == 2 else found.grouped([0], k, 1 - k)))
            assert moved(whole, {name: value.double() for name, value in total.gradients.items()}) <= 2**-12


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_failure_56_a_float32_parameter_that_is_used_in_float64_adds_at_most_c(kind: str) -> None:
    """Factors in float64 have an exact norm, and their sum is in float32."""
    model = Doubled(kind)
    given = torch.randint(0, 9, (4, 5)) if kind == "embedding" else torch.randn(4, 5, WIDTH)
    certificate = preflight(model, losses, {"x": given, "weights": torch.randn(4, 5, WIDTH).double()})
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        weights = 1e12 * torch.randn(1, 1, WIDTH, generator=generator).double()
        weights = weights.abs() * (1 + 1e-3 * torch.randn(1, 60, 1, generator=generator).double())
        weights[:, 30:] *= -1
        weights[:, -1] = -weights[:, :-1].sum(1) * (1 - 1e-7)
        x = torch.full((1, 60), 5) if kind == "embedding" else torch.randn(1, 1, WIDTH).repeat(1, 60, 1)
        added = clipped(model, {"x": x, "weights": weights}, certificate)["weight"]
        assert float(added.norm()) <= 1


def test_failure_56_a_tied_float64_parameter_that_is_used_in_both_types_adds_at_most_c() -> None:
    model = nn.Linear(WIDTH, WIDTH).double()

    def mixed(model: Any, batch: Batch) -> Tensor:
        out = nn.functional.linear(batch["x"].float(), model.weight.float()).double()
        each: Tensor = ((out + nn.functional.linear(batch["x"], model.weight)) * batch["weights"]).sum((1, 2))
        return each + (model.bias * batch["weights"]).sum((1, 2))

    def data(positions: int) -> dict[str, Tensor]:
        return {name: torch.randn(3, positions, WIDTH).double() for name in ("x", "weights")}

    certificate = preflight(model, mixed, data(5))
    for positions in (2, LONG):
        total = ClippedSum(model, rule_of(FlatClipping(norm=1.0)))
        one = {name: value[:1] for name, value in data(positions).items()}
        total.add(record(model, mixed, one, certificate=certificate))
        assert 1 - 1e-3 < float(torch.stack([value.norm() for value in total.gradients.values()]).norm()) <= 1


def test_failure_55_by_groups(certificates: Callable[[Any], Certificate]) -> None:
    model, generator = Linear(bias=True), torch.Generator().manual_seed(5)
    short = [cancelling(1e3, 1e-5, generator) for _ in range(32)]
    long = (torch.randn(LONG, WIDTH), torch.randn(LONG, WIDTH))

    def total(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        made = ClippedSum(model, rule_of(TERMS["clipping"]["groups"](norm=1.0, groups={"*weight": 1, "*": 1})))
        made.add(InGroups(model, losses, batch, certificate=certificates(model)))
        return {name: value.double().clone() for name, value in made.gradients.items()}

    assert moved(total(batch_of([*short, long], LONG)), total(batch_of(short, 2))) <= 1 + 32 * 2**-13
