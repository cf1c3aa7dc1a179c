"""Several processes under DDP train the model that one process trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.gang import Gang
from tests.distributed.tasks import MODELS, STEPS, farthest, trained

TOLERANCE = 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_without_noise_two_processes_agree_with_one(tmp_path: Path, pair: Gang, name: str) -> None:
    alone = trained(str(tmp_path / "one"), name, 1)
    for found in pair.run(trained, str(tmp_path / "two"), name, 2):
        assert found["wrapped"] == "DistributedDataParallel"
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert found["steps"] == STEPS
        assert found["report"] == alone["report"]
