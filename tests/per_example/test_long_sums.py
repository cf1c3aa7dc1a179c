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
from hf_dp.per_example import RowSum, chosen, long_sums, preflight, record
from hf_dp.per_example.factors import OfChosen, Outer
from hf_dp.per_example.gram import Dense, OneHot
from hf_dp.per_example.long_sums import FEW, LongSums, _carry, united, united_where_they_are
from hf_dp.per_example.norms import squared_norms
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
    table, sums, each = nn.Parameter(torch.zeros(3, 1)), [], lopsided(2048)
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


@pytest.fixture(params=["here", "elsewhere"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, and the CPU taken for a device whose answers have to be waited for."""
    if request.param == "elsewhere":
        monkeypatch.setattr("hf_dp.per_example.waiting._AT_ONCE", frozenset())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("side", ["left", "right"])
def test_failure_61_positions_that_look_up_one_row_are_added_up_exactly(side: str) -> None:
    """One by one, each of half a million would be rounded to the sum over all of them."""
    ids, values = OneHot(torch.ones(16, 2048, dtype=torch.long), 5), Dense(torch.full((16, 2048, 2), 1 / 1300.0))
    use = Outer(ids, values) if side == "left" else Outer(values, ids)
    out, coefficients = torch.zeros(5, 2) if side == "left" else torch.zeros(2, 5), torch.full((16,), 1.3)
    for _ in range(16):
        use.add_weighted_(out, coefficients)
    found = out[1] if side == "left" else out[:, 1]
    assert (found.double() - 16 * 16 * 2048 * float(values.values[0, 0, 0] * coefficients[0])).abs().max() <= 1e-4
    assert out.count_nonzero() == 2


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_failure_61_one_more_of_hundreds_moves_the_sum_by_its_norm(is_sparse: bool) -> None:
    """Those beside it lie where it lifts their sum to the next power of two, in which all their positions round up."""

    def looked_up(positions: int, value: float) -> Outer:
        values = torch.tensor([value, 0.0]).expand(1, positions, 2).contiguous()
        return Outer(OneHot(torch.full((1, positions), 3), 9), Dense(values))

    def added_up(uses: list[Outer]) -> Tensor:
        out, rows = torch.zeros(9, 2), RowSum("table", torch.zeros(9, 2))
        for use in uses:
            rows.add_(use, torch.ones(1)) if is_sparse else use.add_weighted_(out, torch.ones(1))
        return rows.of(torch.tensor([3])).double() if is_sparse else out.double()

    one, others = looked_up(1, 1 - 2**-15), [looked_up(1954, 67 * 2**-17), looked_up(2046, -(2**-11))]
    rest = [one] * 127 + others * 64
    assert all(float(sum(squared_norms([use])).sqrt()) < 1 for use in (one, *others))
    assert float((added_up([one, *rest]) - added_up(rest)).norm()) <= 1


def test_sums_where_their_ids_are_first_are_those_of_each_id() -> None:
    torch.manual_seed(0)
    for number, width in ((1, 1), (40, 3), (1000, 2)):
        ids, rows = torch.randint(0, 7, (number,)), torch.randn(number, width)
        sums = united_where_they_are(ids, rows)
        for one in ids.unique():
            places = (ids == one).nonzero().squeeze(1)
            exact = rows[places].double().sum(0).float()
            assert torch.equal(sums[places[0]], exact)
            assert not sums[places[1:]].any()
            found, together = united(ids, rows)
            assert torch.equal(together[found == one][0], exact)


def test_wide_rows_are_added_up_a_few_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, rows = torch.randint(0, 7, (40,)), torch.randn(40, 9)
    known = united(ids, rows)[1], united_where_they_are(ids, rows)
    monkeypatch.setattr(long_sums, "_IN_FLOAT64", 170)
    assert all(map(torch.equal, known, (united(ids, rows)[1], united_where_they_are(ids, rows))))
