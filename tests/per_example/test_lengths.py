"""The bound on rounding, where float32 rounds all that is added up the same way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hf_dp.accounting import FlatClipping
from hf_dp.clipping.flat import Flat
from hf_dp.per_example import Dense, Outer, PerExampleGradients
from hf_dp.per_example.factors import Factors, PerExample
from hf_dp.per_example.lengths import rounding


def contribution(*uses: Factors) -> float:
    """The l2 norm, in units of C, of what the first example adds to the sum: the only one, or as all are."""
    values = uses[0].instantiated().values if isinstance(uses[0], Outer) else uses[0].values
    weight = torch.nn.Parameter(torch.zeros(values.shape[1:]))
    made = PerExampleGradients(torch.zeros(len(values)), {"w": list(uses)}, {"w": weight})
    coefficients = Flat(FlatClipping(norm=1.0)).coefficients(made.squared_norms(), made.rounding())
    return float(made.weighted_sum(coefficients * torch.arange(len(values)).eq(0))["w"].double().norm())


def small_beside_large(length: int, share: float, *places: int) -> torch.Tensor:
    """(length,): squares that are `share` of the ones at `places`, beside which float32 loses them one by one."""
    return torch.full((length,), share**0.5).index_fill(0, torch.tensor(places), 1.0)


def cancelling(left: torch.Tensor, width: int, more: int) -> Outer:
    """Of 200 positions of one row, of which all large numbers cancel but for those of 2 x `more` positions."""
    signs = torch.ones(200, 1).index_fill(0, torch.arange(100 + more, 200), -1.0)
    rows = torch.where(left == 1, signs, left)
    return Outer(Dense(rows[None]), Dense(torch.full((1, 200, width), 2.0**-5)))


def hostile() -> Iterator[Outer]:
    """What loses most to different kernels: they add up other numbers together."""
    for size, share in ((512, 2.9e-8), (1024, 2.9e-8), (1024, 5.5e-8)):
        for places in ([0], [0, size // 2]):
            yield cancelling(small_beside_large(size, share, *places), size, 4)


def test_failure_160_rows_of_which_float32_loses_most_add_at_most_c(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.97 < max(map(contribution, hostile())) <= 1
    monkeypatch.setattr("hf_dp.per_example.lengths.unsure", lambda *given: 0.0)
    assert max(map(contribution, hostile())) > 1 + 1e-4


def test_failure_160_also_where_nothing_is_taken_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr("hf_dp.per_example.norms._refined", lambda uses, norms, bound: norms)
    uses = [cancelling(small_beside_large(1024, share, 0), 1024, 0) for share in (2.9e-8, 5.5e-8)]
    assert max(map(contribution, uses)) <= 1
    monkeypatch.setattr("hf_dp.per_example.lengths.unsure", lambda *given: 0.0)
    assert max(map(contribution, uses)) > 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", [1, 3, 31, 64, 300])
def test_numbers_that_are_all_alike_add_at_most_c(positions: int, dtype: torch.dtype) -> None:
    for number in (1.9921875, 1.9, 1.6328125, 1 / 3, 0.1):
        for left, right in ((1024, 1024), (2, 1000), (1, 300), (3000, 30)):
            sides = (torch.full((1, positions, size), number, dtype=dtype) for size in (left, right))
            assert 0.999 < contribution(Outer(*map(Dense, sides), 100.0)) <= 1


@pytest.mark.parametrize("length", [100, 512, 1000, 4096, 100_000, 1_000_000])
def test_what_is_instantiated_adds_at_most_c(length: int) -> None:
    rows = [torch.full((length,), number) for number in (1.9, 1 / 3, 0.1)]
    rows += [small_beside_large(length, share, 0) for share in (2.9e-8, 5e-8, 1e-7)]
    rows += [small_beside_large(length, 2.9e-8, *range(0, length, 512))]
    assert 1 - 1e-5 < max(contribution(PerExample(row[None])) for row in rows) <= 1


def test_failure_160_the_room_of_a_coefficient_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a norm that is made of the very numbers that are summed."""
    monkeypatch.setattr("hf_dp.clipping.rule._MARGIN", 0.0)
    monkeypatch.setattr("hf_dp.per_example.norms.rounding", lambda *uses: torch.zeros_like(uses[0]))
    assert contribution(PerExample(small_beside_large(1000, 5e-8, 0)[None])) > 1 + 1e-6


@pytest.mark.parametrize("number", [1.9, 1.6328125, 1 / 3, 0.1])
def test_failure_163_many_uses_that_are_all_alike_add_at_most_c(number: float) -> None:
    """A weight in a loop over positions."""
    factors = Outer(Dense(torch.full((1, 1, 64), number)), Dense(torch.ones(1, 1, 64)))
    assert 0.999 < contribution(*[factors] * 200) <= 1
    assert 0.999 < contribution(*[factors.instantiated()] * 1000) <= 1


def test_uses_that_an_example_has_no_part_in_leave_its_bound_as_it_is() -> None:
    own, none = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
    assert torch.equal(rounding(own, none, none), rounding(own))
    assert bool((rounding(own, own) > 4 * rounding(own)).all())


def test_what_is_instantiated_adds_at_most_c_wherever_large_and_tiny_numbers_stand() -> None:
    """Of each eight that a CPU adds up beside one another the first loses most, of numbers and then of blocks."""
    blocks = torch.full((8 * 512,), 2.0**-30.001).index_fill(0, torch.arange(0, 8 * 512, 8), 2.0**-24.001)
    rows = torch.zeros(len(blocks), 512)
    rows[:, 0], rows[0] = blocks.sqrt(), blocks[:512].sqrt()
    rows[0, 0] = 1.0
    assert 1 - 1e-5 < contribution(PerExample(rows.view(1, -1))) <= 1


@pytest.mark.parametrize("length", [512, 2**18])
def test_numbers_that_lie_apart_in_memory_add_at_most_c(length: int) -> None:
    row = small_beside_large(length, 5.9e-8, 0)
    assert 1 - 1e-4 < contribution(PerExample(torch.stack([row, row], 1).T)) <= 1
