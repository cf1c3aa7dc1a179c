"""A row that a selection has several times is told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from torch.utils.data import ConcatDataset, Subset

from hf_dp import PrivacyConfig
from hf_dp.data.repeated import most_often
from tests.training.workbench import make, rows

ROWS = Dataset.from_list([{"x": i} for i in range(6)])


@pytest.mark.parametrize(
    ("dataset", "times"),
    [
        (ROWS, 1),
        (ROWS.shuffle(seed=0), 1),
        (ROWS.select([5, 1, 1, 0]), 2),
        (ROWS.select([5, 1, 1, 0]).select([1, 2, 1]), 3),
        (Subset(ROWS, [0, 2, 4]), 1),  # type: ignore[arg-type]
        (Subset(list(range(4)), [0, 2, 2, 2]), 3),  # type: ignore[arg-type]
        (Subset(Subset(list(range(4)), [0, 2, 2]), [1, 2, 1]), 3),  # type: ignore[arg-type]
        (ConcatDataset([ROWS, ROWS]), 2),  # type: ignore[list-item]
        (ConcatDataset([Subset(ROWS, [0, 1]), Subset(ROWS, [2, 3])]), 1),  # type: ignore[arg-type]
        (list(range(3)), 1),
    ],
)
def test_rows_are_counted_through_all_selections(dataset: Any, times: int) -> None:
    assert most_often(dataset) == times


def test_a_trainer_warns_of_them_once_and_a_unit_of_rows_is_the_way_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbered = Dataset.from_list([{**row, "row": i} for i, row in enumerate(rows())])
    often = numbered.select([*range(len(numbered)), 0, 0, 1])
    make(tmp_path / "a", parts={"train_dataset": often.remove_columns("row")}, max_steps=1).train()
    assert caplog.text.count("has a row up to 3 times") == 1
    assert "max_examples_per_unit=3" in caplog.text
    caplog.clear()
    privacy = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-3, unit="row", max_examples_per_unit=3)
    run = make(tmp_path / "b", parts={"train_dataset": often}, privacy=privacy, max_steps=1)
    run.train()
    assert "times" not in caplog.text
    assert run.ledger.steps == 1
