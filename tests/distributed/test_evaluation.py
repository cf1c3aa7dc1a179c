"""The evaluation that is tried before the first step lets no rank wait for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.evaluated import evaluated
from tests.distributed.gang import Gang


@pytest.mark.parametrize("what", ["metrics", "metrics of one rank"])
@pytest.mark.slow
def test_metrics_that_fail_on_a_few_rows(tmp_path: Path, pair: Gang, what: str) -> None:
    assert pair.run(evaluated, str(tmp_path), what) == [("trained", 1)] * 2


@pytest.mark.slow
def test_rows_that_cannot_be_evaluated_cost_nothing(tmp_path: Path, pair: Gang) -> None:
    for found, steps in pair.run(evaluated, str(tmp_path), "rows"):
        assert "evaluation fails on the first rows of eval_dataset " in found
        assert steps == 0
