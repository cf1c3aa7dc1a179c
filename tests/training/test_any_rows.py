"""Whatever the rows are: what is begun goes through with every row, and anything else is refused before it costs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_dp import PrivateRun
from tests.strategies import cases, rows_of, unless_refused
from tests.training.workbench import pad, private, rows

WORDS, CLASSES = 40, 3
# More than are looked at one by one.
ROWS = [{"input_ids": [i % WORDS for i in row["input_ids"]], "labels": row["labels"]} for row in rows(90)]


class Bag(nn.Module):
    """Classifies by the mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head((self.table(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return logits


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"], reduction="none")


@pytest.mark.fuzzed
@cases(25)
@given(rows_of(ROWS), st.sampled_from(["list", "table", "tuple"]), st.integers(1, 16))
@pytest.mark.slow
def test_what_is_begun_goes_through_with_every_row(given: list[dict[str, Any]], kind: str, expected: int) -> None:
    data: Any = tuple(given) if kind == "tuple" else given
    if kind == "table":
        try:
            data = Dataset.from_list(given)
        except (TypeError, ValueError, OverflowError, pa.ArrowException):
            return  # no table has such columns
    model, sizes = Bag(), {"expected_batch_size": expected, "micro_batch_size": 8, "steps": 2}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def begun() -> PrivateRun:
        run = PrivateRun(model, data, private(), pad, loss=loss, **sizes)
        run.begin(optimizer)
        return run

    run = unless_refused(begun)
    if run is None:
        return
    engine = run._run.engine
    for row in range(len(data)):
        loss(model, engine._rows.batch(engine.loader.dataset.__getitems__([row])))  # type: ignore[attr-defined]
    for batch in run.batches():
        run.step(batch)
        optimizer.step()
    assert run.ledger.steps == 2
    assert all(bool(p.isfinite().all()) for p in model.parameters())
