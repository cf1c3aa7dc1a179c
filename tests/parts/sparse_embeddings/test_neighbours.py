"""Neighbouring batches: one unit more moves the contribution map by at most C1, and the gradient by at most C2."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dp.accounting.terms import TERMS
from hf_dp.clipping.table import RULES, rule_of
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows
from hf_dp.per_example import Tables, record
from hf_dp.per_example.batch import Batch, take
from hf_dp.randomness import Entropy
from hf_dp.step.clipped_sum import ClippedSum

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


def released(model: Two, batches: list[Batch], c1: float, c2: float, clipping: str) -> tuple[Tensor, Tensor]:
    """The contribution map and the gradient of one logical batch, without noise, as vectors."""
    tables = Tables.of({"one.weight": model.one.weight, "two.weight": model.two.weight})
    chosen = TableRows(tables, None, AdaptiveSelection(tables.rows, 1.0, None, GaussianNoise(Entropy(0))), c1)
    total = ClippedSum(model, rule_of(TERMS["clipping"][clipping](norm=c2)), chosen)
    for batch in batches:
        total.add(record(model, loss, batch, tables=NAMES))
    counts = torch.zeros(2 * ROWS, dtype=torch.float64)
    assert chosen.contributions is not None
    rows, values = chosen.contributions.touched()
    counts[rows] = values
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
