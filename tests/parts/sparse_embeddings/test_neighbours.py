"""Neighbouring batches: one unit more moves the contribution map by at most C1, and the gradient by at most C2."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dp.accounting.terms import TERMS
from hf_dp.clipping.table import RULES, rule_of
from hf_dp.data.cut import by_units
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows
from hf_dp.per_example import Pieces, Tables, record
from hf_dp.per_example.batch import Batch, take
from hf_dp.randomness import Entropy
from hf_dp.step.clipped_sum import ClippedSum
from hf_dp.units.packing import Owners

ROWS, NAMES = 12, ("one.weight", "two.weight")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = nn.Embedding(ROWS, 3), nn.Embedding(ROWS, 2), nn.Linear(5, 2)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.one(ids).sum(1), self.two(ids.flip(1)[:, :2]).sum(1)], dim=1)
        logits: Tensor = self.head(both)
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"], reduction="none") * batch["scale"]


def released(
    model: Two, batches: Iterable[Batch | tuple[Batch, Owners]], c1: float, c2: float, clipping: str
) -> tuple[Tensor, Tensor]:
    """The contribution map and the gradient of one logical batch, without noise, as vectors; of rows by themselves, or
    of units."""
    tables = Tables.of({"one.weight": model.one.weight, "two.weight": model.two.weight})
    chosen = TableRows(tables, None, AdaptiveSelection(tables.rows, 1.0, None, GaussianNoise(Entropy(0))), c1)
    given = {"groups": (("one.*", 3.0), ("*", 1.0))} if clipping == "groups" else {}
    total = ClippedSum(model, rule_of(TERMS["clipping"][clipping](norm=c2, **given)), chosen)
    pieces = Pieces(NAMES)
    for batch in batches:
        rows, owners = batch if isinstance(batch, tuple) else (batch, None)
        found = record(model, loss, rows, tables=NAMES)
        total.add(found if owners is None else pieces.joined(found.grouped(*owners)))
    pieces.refuse_rest()
    counts = torch.zeros(2 * ROWS, dtype=torch.float64)
    assert chosen.contributions is not None
    touched, values = chosen.contributions.touched()
    counts[touched] = values
    whole = torch.arange(ROWS)
    parts = [*total.gradients.values(), *(sums.of(whole) for sums in total.rows.values())]
    return counts, torch.cat([part.flatten() for part in parts])


@settings(max_examples=60)
@given(
    ids=st.lists(st.lists(st.integers(0, ROWS - 1), min_size=4, max_size=4), min_size=2, max_size=6),
    scale=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 1e3, float("inf"), float("nan")]), min_size=6, max_size=6),
    c1=st.sampled_from([0.5, 1.0, 1.7, 2.0, 10.0]),
    cut=st.integers(1, 5),
    left_out=st.integers(0, 5),
    clipping=st.sampled_from(sorted(RULES)),
)
def test_one_unit_moves_the_contribution_map_by_at_most_c1(
    ids: list[list[int]], scale: list[float], c1: float, cut: int, left_out: int, clipping: str
) -> None:
    n = len(ids)
    batch = {
        "ids": torch.tensor(ids),
        "y": torch.arange(n) % 2,
        "scale": torch.tensor(scale[:n], dtype=torch.float64),
    }
    rest = [i for i in range(n) if i != left_out % n]
    cuts = [range(n)[:cut], range(n)[cut:]]
    model = Two()
    counts, gradient = released(model, [take(batch, part) for part in cuts if len(part)], c1, 0.5, clipping)
    without, other = released(model, [take(batch, rest)] if rest else [], c1, 0.5, clipping)
    assert float((counts - without).norm()) <= c1 * (1 + 1e-12)
    assert float((gradient - other).norm()) <= 0.5 * (1 + 1e-9)
    # Negative control: all of its rows count, and only the clipping bounds them.
    touched = int((counts != without).sum())
    unit = scale[left_out % n]
    if unit in (1.0, 1e3):
        assert float((counts - without).norm()) >= min(c1, touched**0.5) * (1 - 1e-9)
    elif unit != 1e-3:
        assert touched == 0


IDS = st.lists(st.lists(st.integers(0, ROWS - 1), min_size=4, max_size=4), min_size=3, max_size=7)
SCALES = st.lists(st.sampled_from([1e-3, 1.0, 1e3, float("nan")]), min_size=7, max_size=7)


@settings(max_examples=12)
@given(ids=IDS, scale=SCALES, drawn=st.integers(1, 3), c1=st.sampled_from([0.5, 1.7, 10.0]))
def test_rows_of_a_user_that_are_drawn_by_themselves_move_each_by_as_many_times_its_bound(
    ids: list[list[int]], scale: list[float], drawn: int, c1: float
) -> None:
    """Both in units of their bounds: so far the two together are moved too, whichever noise has which share."""
    n, drawn, model = len(ids), min(drawn, len(ids) - 1), Two()
    batch = {"ids": torch.tensor(ids), "y": torch.arange(n) % 2, "scale": torch.tensor(scale[:n], dtype=torch.float64)}
    counts, gradient = released(model, [batch], c1, 0.5, "flat")
    without, other = released(model, [take(batch, range(drawn, n))], c1, 0.5, "flat")
    assert float((counts - without).norm()) <= drawn * c1 * (1 + 1e-12)
    assert float((gradient - other).norm()) <= drawn * 0.5 * (1 + 1e-9)


def _alike(n: int) -> Batch:
    ids = torch.tensor([[1, 2, 3, 4]] * n)
    return {"ids": ids, "y": torch.zeros(n, dtype=torch.int64), "scale": torch.full((n,), 1e3, dtype=torch.float64)}


def test_negative_control_two_rows_that_are_alike_move_both_twice_as_far_as_one() -> None:
    counts, gradient = released(Two(), [_alike(2)], 1.0, 0.5, "flat")
    assert (float(counts.norm()), float(gradient.norm())) == (pytest.approx(2), pytest.approx(1))


@settings(max_examples=12)
@given(
    ids=IDS, scale=SCALES, owners=st.lists(st.integers(0, 2), min_size=7, max_size=7), micro=st.integers(1, 7),
    c1=st.sampled_from([0.5, 1.7, 10.0]), clipping=st.sampled_from(sorted(RULES)),
)  # fmt: skip
def test_all_rows_of_a_unit_move_each_by_at_most_its_bound(
    ids: list[list[int]], scale: list[float], owners: list[int], micro: int, c1: float, clipping: str
) -> None:
    n, model = len(ids), Two()
    batch = {"ids": torch.tensor(ids), "y": torch.arange(n) % 2, "scale": torch.tensor(scale[:n], dtype=torch.float64)}

    def of(names: set[int]) -> tuple[Tensor, Tensor]:
        units = [[i for i in range(n) if owners[i] == name] for name in sorted(names)]
        cut = by_units(sorted(units, key=len), micro, None, lambda rows: take(batch, rows), dict, int)
        return released(model, [(few, whose) for (_, few), whose in cut], c1, 0.5, clipping)

    names = set(owners[:n])
    (counts, gradient), (without, other) = of(names), of(names - {owners[0]})
    assert float((counts - without).norm()) <= c1 * (1 + 1e-12)
    assert float((gradient - other).norm()) <= 0.5 * (1 + 1e-9)
    # The oracle: a row of a table counts for a unit if any of its rows touches it.
    mine = [i for i in range(n) if owners[i] == owners[0]]
    if not any(map(math.isnan, (scale[i] for i in mine))):
        touched = {row for i in mine for row in (*ids[i], *(ROWS + each for each in ids[i][:1:-1]))}
        expected = torch.zeros(2 * ROWS, dtype=torch.float64)
        expected[sorted(touched)] = min(1.0, c1 / len(touched) ** 0.5)
        assert torch.allclose(counts - without, expected)


def test_negative_control_rows_of_one_unit_that_count_by_themselves_move_the_counts_further() -> None:
    batch, moved = _alike(4), []
    for owners in ([0, 0, 0, 0], [0, 1, 2, 3]):
        counts, _ = released(Two(), [(batch, Owners(owners))], 1.0, 0.5, "flat")
        moved.append(float(counts.norm()))
    assert moved == [pytest.approx(1), pytest.approx(4)]
