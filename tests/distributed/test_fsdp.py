"""Models that `fully_shard` splits are trained to what one process trains."""

from __future__ import annotations

import pytest

from tests.distributed.gang import Gang
from tests.distributed.sharded import stepped
from tests.distributed.tasks import MODELS, farthest

TOLERANCE = 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_without_noise_shards_agree_with_one_process(pair: Gang, name: str, checkpointing: bool) -> None:
    alone = stepped(name)
    for found in pair.run(stepped, name, "blocks", 8, checkpointing):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-4)
