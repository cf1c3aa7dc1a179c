"""Pairs of answers on several processes: TRL's trainers under DDP train the model that one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

from tests.distributed.gang import Gang
from tests.distributed.preferring import STEPS, preferred, preferred_alone
from tests.distributed.tasks import farthest

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.mark.parametrize(
    "case",
    ["adapter switched off", "beforehand", "a model of its own", "rewards", "by user"],
)
@pytest.mark.slow
def test_two_processes_agree_with_one(tmp_path: Path, pair: Gang, case: str) -> None:
    alone = pair.alone_once(preferred_alone, case)
    moved = farthest(alone["before"], alone["parameters"])
    assert moved > 0.05
    for found in pair.run(preferred, str(tmp_path / "two"), case, 2):
        assert found["wrapped"] == "DistributedDataParallel"
        assert farthest(found["parameters"], alone["parameters"]) < 1e-5 * moved
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert len(found["losses"]) == STEPS
        assert found["report"] == alone["report"]
