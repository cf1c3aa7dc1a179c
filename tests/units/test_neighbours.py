"""Neighbours: all rows of one unit, or none, move the clipped sum by at most C. By rows, they would not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dp.data.cut import by_units
from hf_dp.errors import HfDpError
from hf_dp.per_example import Pieces, record
from hf_dp.per_example.batch import Batch, take
from hf_dp.step.clipped_sum import ClippedSum
from tests.step.test_neighbours import DTYPES, EXPONENTS, KINDS, SLACK, Model, l2, loss, rule


def rows(owners: list[int], length: int, exponents: list[int], seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    size = len(owners)
    return {
        "ids": torch.randint(0, 9, (size, length), generator=draw),
        "labels": torch.randint(0, 9, (size, length), generator=draw),
        "scale": torch.tensor([10.0**e for e in exponents], dtype=torch.float64),
    }


def clipped(
    model: Model, batch: Batch, owners: list[int], norm: float, kind: str, micro: int = 6, by_rows: bool = False
) -> dict[str, torch.Tensor]:
    """Micro-batches of so many rows, also for units that have more; the sum of a unit's rows is its gradient."""
    total, pieces = ClippedSum(model, rule(kind, norm)), Pieces()
    units = [[i for i, owner in enumerate(owners) if owner == name] for name in sorted(set(owners))]
    for (_, some), whose in by_units(sorted(units, key=len), micro, None, lambda rows: take(batch, rows), dict, int):
        found = record(model, loss, some)
        total.add(found if by_rows else pieces.joined(found.grouped(*whose)))
    pieces.refuse_rest()
    assert total.examples == len(owners if by_rows else units)
    return total.gradients


@settings(max_examples=15)
@given(
    owners=st.lists(st.integers(0, 3), min_size=2, max_size=8),
    data=st.data(),
    dtype=DTYPES,
    is_tied=st.booleans(),
    kind=KINDS,
    micro=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_one_unit_moves_the_sum_by_at_most_c(
    owners: list[int], data: st.DataObject, dtype: torch.dtype, is_tied: bool, kind: str, micro: int, seed: int
) -> None:
    exponents = data.draw(st.lists(EXPONENTS, min_size=len(owners), max_size=len(owners)))
    norm, one = 10.0 ** data.draw(st.integers(-3, 3)), data.draw(st.sampled_from(sorted(set(owners))))
    model = Model(seed, data.draw(st.integers(1, 7)), is_tied, dtype)
    batch = rows(owners, data.draw(st.integers(1, 5)), exponents, seed)
    full = clipped(model, batch, owners, norm, kind, micro)
    others = [i for i, owner in enumerate(owners) if owner != one]
    alone = [i for i, owner in enumerate(owners) if owner == one]
    slack = SLACK[next(iter(full.values())).dtype] * (l2(full.values()) + norm)
    assert all(v.isfinite().all() for v in full.values())
    assert l2(clipped(model, take(batch, alone), [0] * len(alone), norm, kind).values()) <= norm
    if others:
        without = clipped(model, take(batch, others), [owners[i] for i in others], norm, kind, micro)
        assert l2(full[k].double() - without[k].double() for k in full) <= norm + slack
    # One row of it less, or another in its place: both are about one unit, whose part is at most C before and after.
    if len(alone) > 1 or others:
        less = [i for i in range(len(owners)) if i != alone[0]]
        changed = {**batch, "scale": batch["scale"].clone()}
        changed["scale"][alone[0]] *= -3
        for other, whose in ((take(batch, less), [owners[i] for i in less]), (changed, owners)):
            moved = clipped(model, other, whose, norm, kind, micro)
            assert l2(full[k].double() - moved[k].double() for k in full) <= 2 * norm + slack


def test_negative_control_clipped_by_rows_one_unit_moves_the_sum_by_more() -> None:
    model = Model(0, 4, True, torch.float64)
    owners, batch = [0, 0, 0, 0, 1], rows([0] * 5, 4, [3] * 5, 0)
    batch["ids"][:4], batch["labels"][:4] = batch["ids"][0].clone(), batch["labels"][0].clone()
    moved = {}
    for by_rows, micro in ((False, 6), (False, 3), (True, 6)):
        full = clipped(model, batch, owners, 1.0, "flat", micro, by_rows)
        without = clipped(model, take(batch, [4]), [0], 1.0, "flat", micro, by_rows)
        moved[by_rows, micro] = l2(full[k] - without[k] for k in full)
    assert moved == {(False, 6): pytest.approx(1), (False, 3): pytest.approx(1), (True, 6): pytest.approx(4)}


def test_negative_control_clipped_by_micro_batches_one_unit_moves_the_sum_by_more() -> None:
    """What a unit would do whose pieces were taken for units."""
    model, batch = Model(0, 4, True, torch.float64), rows([0] * 4, 4, [3] * 4, 0)
    batch["ids"][:], batch["labels"][:] = batch["ids"][0].clone(), batch["labels"][0].clone()
    total = ClippedSum(model, rule("flat", 1.0))
    for few in ([0, 1], [2, 3]):
        total.add(record(model, loss, take(batch, few)).grouped([0, 0]))
    assert l2(total.gradients.values()) == pytest.approx(2)
    with pytest.raises(HfDpError, match="2 rows of an example that has more in other micro-batches"):
        total.add(record(model, loss, take(batch, [0, 1])).grouped([0, 0], 0, 2))


@pytest.mark.parametrize("micro", [2, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_leaves_its_unit_out_and_no_other(bad: float, micro: int) -> None:
    model, owners = Model(0, 4, True, torch.float64), [0, 0, 1]
    batch = rows(owners, 4, [0] * 3, 0)
    other = clipped(model, take(batch, [2]), [0], 1.0, "flat")
    batch["scale"][1] = bad
    found = clipped(model, batch, owners, 1.0, "flat", micro)
    assert l2(found[k] - other[k] for k in found) <= 1e-12
