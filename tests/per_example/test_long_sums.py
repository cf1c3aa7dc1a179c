"""Sums over thousands of examples: that of neighbours is as far from it as one example, whatever they round to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dp.accounting import FlatClipping
from hf_dp.clipping.table import rule_of
from hf_dp.per_example import RowSum, chosen, preflight, record
from hf_dp.per_example.factors import OfChosen, Outer
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.long_sums import FEW, LongSums, _carry
from hf_dp.step.clipped_sum import ClippedSum

_WIDTH, _ONE = 64, 1 - 2.0**-12
# Such as float64 has the sum of.
_FLOATS = st.builds(math.ldexp, st.integers(-(2**24), 2**24), st.integers(-14, 14))


def lopsided(size: int) -> tuple[list[float], list[float]]:
    """Numbers whose sum is just below a power of two; and such as are rounded up beyond it, one after another, and not
    below: between them one number of nearly 1 decides which."""
    whole = 2.0 ** int(math.log2(size / 2))
    ulp = whole * 2.0**-23
    first = [_ONE] * int(whole)
    rest = whole - 0.6 - sum(first)
    first.append(round(rest / ulp) * ulp)
    many = int(0.2 / ulp) // 2 * 2
    then = [((many + 1) + 0.5) * ulp, -(many + 0.5) * ulp]
    return first, (then * size)[: size - len(first) - 1]


class Linear(nn.Module):
    def __init__(self, trained: str) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        for name, p in self.linear.named_parameters():
            p.requires_grad_(name == trained)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses: Tensor = (model(batch["x"]) * batch["gradient"]).sum(1)
    return losses


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.slow), 64, 4096])
@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_failure_69_no_addition_is_rounded_to_the_whole(trained: str, at_once: int) -> None:
    model = Linear(trained)
    few = {"x": torch.randn(4, _WIDTH), "gradient": torch.randn(4, _WIDTH)}
    certificate = preflight(model, loss, few)

    def total(numbers: list[float]) -> Tensor:
        found = ClippedSum(model, rule_of(FlatClipping(norm=1.0)))
        for part in torch.tensor(numbers, dtype=torch.float64).split(at_once):
            # In each entry of the gradient, which is so long.
            gradient = part[:, None].expand(-1, _WIDTH) / (8 if trained == "bias" else 64)
            batch = {"x": torch.ones(len(part), _WIDTH), "gradient": gradient.float()}
            found.add(record(model, loss, batch, certificate=certificate))
        return found.gradients[f"linear.{trained}"].double()

    first, then = lopsided(2048 if at_once == 1 else 4096)
    assert (total([*first, _ONE, *then]) - total([*first, *then])).norm() == pytest.approx(_ONE, abs=1e-4)


def test_of_few_examples_rounding_takes_a_thousandth() -> None:
    def total(numbers: list[float]) -> float:
        buffer = torch.zeros(1)
        sums = LongSums([buffer])
        for number in numbers:
            buffer += number
            sums.added(1)
        sums.settle()
        return float(buffer)

    first, then = lopsided(FEW)
    moved = total([*first, _ONE, *then]) - total([*first, *then])
    assert _ONE < moved < 1.001


@pytest.mark.parametrize("has_bags", [True, False])
def test_failure_69_where_examples_are_left_out_by_selection(has_bags: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    if has_bags:
        monkeypatch.setattr(chosen, "_BY_INDEX", frozenset({"cpu"}))

    def total(numbers: list[float]) -> float:
        rows, out = torch.tensor([*numbers, math.nan])[:, None], torch.zeros(1)
        coefficients = torch.ones(len(rows))
        coefficients[-1] = 0
        OfChosen(rows, chosen.Chosen(coefficients)).add_weighted_(out, coefficients)
        return float(out)

    first, then = lopsided(4096)
    assert total([*first, _ONE, *then]) - total([*first, *then]) == pytest.approx(_ONE, abs=1e-3)


def test_negative_control_one_by_one() -> None:
    def total(numbers: list[float]) -> float:
        found = torch.zeros(())
        for number in numbers:
            found += torch.tensor(number)
        return float(found)

    first, then = lopsided(4096)
    assert total([*first, _ONE, *then]) - total([*first, *then]) > 1.2


def test_failure_69_rows_of_tables() -> None:
    table, sums, each = nn.Parameter(torch.zeros(3, 1)), [], lopsided(4096)
    for numbers in ([*each[0], _ONE, *each[1]], [*each[0], *each[1]]):
        rows = RowSum("table", table)
        for part in torch.tensor(numbers).split(1):
            use = Outer(OneHot(torch.ones(len(part), 1, dtype=torch.int64), 3), Dense(part[:, None, None]))
            rows.add_(use, torch.ones(len(part)))
        sums.append(float(rows.of(torch.tensor([1]))))
    assert sums[0] - sums[1] == pytest.approx(_ONE, abs=1e-3)


@given(_FLOATS, _FLOATS)
def test_what_rounding_takes_away_is_kept(total: float, part: float) -> None:
    one, other = torch.tensor([total]), torch.tensor([part])
    exact = one.double() + other.double()
    _carry(one, other)
    assert float(one) == float(exact.float())
    assert float(one.double() + other.double()) == float(exact)


def test_into_a_shard_come_examples_of_all_ranks() -> None:
    buffer = torch.ones(1)
    sums = LongSums([buffer], ranks=8)
    sums.added(FEW // 8)
    assert not sums._totals
    sums.added(1)
    assert sums._totals[0].tolist() == [1]


def test_few_examples_take_no_further_memory() -> None:
    buffer = torch.zeros(3)
    sums = LongSums([buffer])
    for _ in range(FEW):
        buffer += 1
        sums.added(1)
    assert not sums._totals
    assert buffer.tolist() == [FEW] * 3
    buffer += 1
    sums.added(1)
    assert buffer.tolist() == [0] * 3
    buffer += 2
    sums.settle()
    assert buffer.tolist() == [FEW + 3] * 3
    sums.settle()
    assert buffer.tolist() == [FEW + 3] * 3
