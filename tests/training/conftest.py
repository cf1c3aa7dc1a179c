"""A training that has stopped, for all tests that go on with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.resuming.resumed import STEPS, trainer


@pytest.fixture(scope="session")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run that stopped after its first checkpoint, to be copied and spoilt."""
    path = tmp_path_factory.mktemp("checkpointed") / "out"
    trainer(path, seed=7).train()
    shutil.rmtree(path / f"checkpoint-{STEPS}")
    return path
