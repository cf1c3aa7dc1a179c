"""Gradients of experts' matrices are those of a matrix by itself for each pair of an example and an expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_dp.per_example.chosen import Chosen
from hf_dp.per_example.factors import Outer, PerExample
from hf_dp.per_example.gram import Dense
from hf_dp.per_example.grouped import Grouping
from hf_dp.per_example.idle import without_idle
from hf_dp.per_example.norms import all_squared_norms, magnitude_of, squared_norms
from hf_dp.per_example.routed import Routed

EXPERTS, LEFT, RIGHT = 5, 4, 3


def routed(size: int = 4, positions: int = 9, dtype: torch.dtype = torch.float64, seed: int = 0) -> Routed:
    """Expert 3 is given nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, EXPERTS, (size, positions), generator=generator)
    left = torch.randn(size, positions, LEFT, generator=generator, dtype=torch.float64).to(dtype)
    right = torch.randn(size, positions, RIGHT, generator=generator, dtype=torch.float64).to(dtype)
    return Routed(Dense(left), Dense(right), 0.5, ids=ids.masked_fill(ids == 3, 0), experts=EXPERTS)


def by_hand(of: Routed) -> Tensor:
    """(B, E, p, d), position by position."""
    made = torch.zeros(len(of.ids), of.experts, of.left.size, of.right.size, dtype=torch.float64)
    for i, row in enumerate(of.ids.tolist()):
        for t, expert in enumerate(row):
            made[i, expert] += of.scale * torch.outer(of.left.tensor[i, t].double(), of.right.tensor[i, t].double())
    return made


def norms_of(values: Tensor) -> Tensor:
    return values.flatten(1).square().sum(1)


def test_it_is_instantiated_as_by_hand() -> None:
    torch.testing.assert_close(routed().instantiated().values, by_hand(routed()))
    torch.testing.assert_close(routed().transposed.instantiated().values, by_hand(routed()).mT)


@pytest.mark.parametrize("positions", [1, 2, 9, 70])
def test_norms(positions: int) -> None:
    one = routed(positions=positions)
    torch.testing.assert_close(squared_norms([one])[0], norms_of(by_hand(one)))
    other = routed(seed=1, positions=positions)
    together = norms_of(by_hand(one)) + norms_of(by_hand(other))
    torch.testing.assert_close(all_squared_norms([[one], [other]])[0][0], together)


def test_norms_of_what_is_used_several_times() -> None:
    """Also as rows that are looked up, and as a gradient that is instantiated."""
    one, two = routed(), routed(seed=1)
    values = torch.randn(4, EXPERTS, LEFT, RIGHT, dtype=torch.float64)
    expected = by_hand(one) + by_hand(two) + values
    torch.testing.assert_close(squared_norms([one, two, PerExample(values)])[0], norms_of(expected))
    torch.testing.assert_close(squared_norms([one, two])[0], norms_of(by_hand(one) + by_hand(two)))
    joined = Routed.joined([one, two])
    assert joined is not None
    torch.testing.assert_close(by_hand(joined), by_hand(one) + by_hand(two))
    assert Routed.joined([one, two.scaled(2.0)]) is None
    assert Routed.joined([one, PerExample(values)]) is None


def test_sums_of_all_of_some_and_of_none() -> None:
    one, weights = routed(), torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    expected = (weights[:, None, None, None] * by_hand(one)).sum(0)
    for use, own in (
        (one, weights),
        (one.selected(torch.tensor([0, 2, 3])), weights[[0, 2, 3]]),
        (one.masked(Chosen(weights)), weights),
    ):
        out = torch.zeros(EXPERTS, LEFT, RIGHT, dtype=torch.float64)
        use.add_weighted_(out, own)
        torch.testing.assert_close(out, expected)
    out = torch.zeros(EXPERTS, LEFT, RIGHT, dtype=torch.float64)
    one.selected(torch.tensor([], dtype=torch.int64)).add_weighted_(out, weights[:0])
    assert not out.any()


def test_an_example_that_is_no_number_stays_by_itself() -> None:
    one = routed()
    one.left.tensor[1, 2] = torch.nan
    norms = squared_norms([one])[0]
    assert norms.isnan().tolist() == [False, True, False, False]
    out = torch.zeros(EXPERTS, LEFT, RIGHT, dtype=torch.float64)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    one.masked(Chosen(weights)).add_weighted_(out, weights)
    torch.testing.assert_close(out, by_hand(routed())[[0, 2, 3]].sum(0))


def test_its_magnitude_is_no_less_than_its_norm_and_no_more_than_if_one_expert_had_all() -> None:
    one = routed(positions=40)
    found = magnitude_of(one)
    assert bool((found >= norms_of(by_hand(one)).sqrt()).all())
    assert bool((found <= Outer(one.left, one.right, one.scale).lengths().magnitude()).all())


def test_bf16_factors_are_near_and_the_bound_covers_it() -> None:
    one = routed(positions=40, dtype=torch.bfloat16)
    norms, bound = squared_norms([one])
    assert norms.dtype == torch.float32
    assert bool(((norms.double() - norms_of(by_hand(one))).abs() <= bound).all())
    out = torch.zeros(EXPERTS, LEFT, RIGHT)
    one.add_weighted_(out, torch.ones(4))
    torch.testing.assert_close(out.double(), by_hand(one).sum(0), rtol=1e-5, atol=1e-5)


def test_rows_of_one_example_are_more_positions_of_it() -> None:
    one = routed(size=5)
    found = Grouping([0, 1, 0, 2, 1], [one]).of(one)
    expected = torch.stack([by_hand(one)[[0, 2]].sum(0), by_hand(one)[[1, 4]].sum(0), by_hand(one)[3]])
    torch.testing.assert_close(squared_norms([found])[0], norms_of(expected))
    assert bool((magnitude_of(found) >= norms_of(expected).sqrt()).all())


def test_idle_positions_are_left_where_they_are() -> None:
    one = routed()
    for side in (one.left, one.right):
        side.tensor[:, 1:] = 0
    assert without_idle(one) is one
