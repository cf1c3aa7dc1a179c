"""Sparse gradients of units of several rows: the same whole in one micro-batch and in pieces, as others may decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_dp.accounting import FlatClipping
from hf_dp.accounting.terms import TERMS
from hf_dp.clipping.table import rule_of
from hf_dp.errors import HfDpError
from hf_dp.noise.gaussian import GaussianNoise
from hf_dp.parts.sparse_embeddings import AdaptiveSelection, TableRows
from hf_dp.per_example import PerExampleGradients, Pieces, Tables, preflight, record
from hf_dp.per_example.in_groups import InGroups
from hf_dp.per_example.passes import record_in_two_passes
from hf_dp.randomness import Entropy
from hf_dp.step.clipped_sum import ClippedSum

ROWS, TABLE = 50, ("table.weight",)
Batch = dict[str, Tensor]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(ROWS, 4), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(ids).sum(1))[:, 0]
        return found


def loss(model: nn.Module, batch: Batch) -> Tensor:
    losses: Tensor = model(batch["ids"]) * batch["weight"]
    return losses


def rows_of(*rows: tuple[list[int], float]) -> Batch:
    return {"ids": torch.tensor([ids for ids, _ in rows]), "weight": torch.tensor([weight for _, weight in rows])}


def adaptive(kept: Tensor | None = None) -> AdaptiveSelection:
    return AdaptiveSelection(ROWS, 1.0, None, GaussianNoise(Entropy(0)), kept)


@pytest.fixture
def model() -> Bag:
    return Bag()


def certificate_of(model: Bag) -> Any:
    return preflight(model, loss, {"ids": torch.randint(1, ROWS, (4, 3)), "weight": torch.randn(4)}, tables=TABLE)


def added(model: Bag, choice: TableRows, batches: list[tuple[Batch, Any]], passes: int = 1) -> ClippedSum:
    """The sum over units, each with the micro-batches that its rows are in."""
    certificate, total, pieces = (
        certificate_of(model),
        ClippedSum(model, rule_of(FlatClipping(norm=1.0)), choice),
        Pieces(TABLE),
    )

    def recorded(batch: Batch, owners: Any) -> PerExampleGradients:
        if passes == 2:
            return record_in_two_passes(model, loss, batch, certificate=certificate, tables=TABLE, owners=owners)
        return record(model, loss, batch, certificate=certificate, tables=TABLE).grouped(*owners)

    for batch, owners in batches:
        total.add(pieces.joined(choice.restricted(recorded(batch, owners))))
    pieces.refuse_rest()
    return total


def tables_of(model: Bag) -> Tables:
    return Tables.of({"table.weight": model.table.weight})


@pytest.mark.parametrize("passes", [1, 2])
def test_failure_65_rows_that_are_not_trained_take_no_share_of_a_unit_that_is_whole(model: Bag, passes: int) -> None:
    """Their lengths would, where rounding may be as large: of a unit in pieces they do not."""
    model.head.requires_grad_(False)
    # The frozen row's gradient is so large that rounding could have been all that the other has.
    one, other = ([7, 7, 7], 20.0), ([8, 8, 8], 1e6)
    sums = []
    for batches in (
        [(rows_of(one, other), ([0, 0], 0, 0))],
        [(rows_of(one), ([0], 0, 1)), (rows_of(other), ([0], 1, 0))],
    ):
        total = added(model, TableRows(tables_of(model), torch.tensor([7])), batches, passes)
        sums.append(total.rows["table.weight"].of(torch.arange(ROWS)))
    whole, in_pieces = sums
    torch.testing.assert_close(whole, in_pieces)
    assert whole.norm() == pytest.approx(1.0, abs=1e-3)


def test_failure_66_a_unit_whose_rows_cancel_is_counted_whole_and_in_pieces(model: Bag) -> None:
    one, other = ([7, 8, 9], 1.0), ([7, 8, 9], -1.0)
    found = []
    for batches in (
        [(rows_of(one, other), ([0, 0], 0, 0))],
        [(rows_of(one), ([0], 0, 1)), (rows_of(other), ([0], 1, 0))],
    ):
        choice = TableRows(tables_of(model), None, adaptive(), 1.0)
        added(model, choice, batches)
        assert choice.contributions is not None
        found.append(choice.contributions.touched())
    for touched, counts in found:
        assert touched.tolist() == [7, 8, 9]
        torch.testing.assert_close(counts, torch.full((3,), 3**-0.5, dtype=torch.float64))


def test_failure_64_rows_that_are_not_kept_are_left_out_of_units_by_groups(model: Bag) -> None:
    kept, certificate = torch.tensor([7, 11]), certificate_of(model)
    choice = TableRows(tables_of(model), kept, adaptive(kept), 1.0)
    rule = rule_of(TERMS["clipping"]["groups"](norm=1.0, groups=(("table*", 1.0), ("*", 1.0))))
    total, batch = ClippedSum(model, rule, choice), rows_of(([7, 8, 9], 1.0), ([9, 9, 9], 2.0))
    grouped = InGroups(model, loss, batch, certificate=certificate, tables=TABLE, owners=[0, 0])
    total.add(choice.restricted(grouped))
    assert choice.contributions is not None
    assert choice.contributions.touched()[0].tolist() == [7]
    assert total.rows["table.weight"].of(torch.arange(ROWS)).any(1).nonzero().tolist() == [[7]]


def test_rows_outside_of_those_that_are_kept_are_not_drawn_among_them() -> None:
    with pytest.raises(HfDpError, match="rows that are not trained"):
        adaptive(torch.tensor([7, 11])).survivors(torch.tensor([8]), torch.ones(1, dtype=torch.float64), 0)


def test_pieces_in_two_passes_have_their_tables(model: Bag) -> None:
    choice = TableRows(tables_of(model), None, adaptive(), 1.0)
    one, other = (rows_of(([7, 8, 9], 1.0)), ([0], 0, 1)), (rows_of(([7, 8, 10], 1.0)), ([0], 1, 0))
    added(model, choice, [one, other], passes=2)
    assert choice.contributions is not None
    assert choice.contributions.touched()[0].tolist() == [7, 8, 9, 10]
    # What DP-FEST's choice asks of the first piece.
    first = record_in_two_passes(model, loss, one[0], certificate=certificate_of(model), tables=TABLE, owners=one[1])
    examples, rows = tables_of(model).touched(Pieces(TABLE).joined(first).factors)
    assert len(examples) == len(rows) == 0
