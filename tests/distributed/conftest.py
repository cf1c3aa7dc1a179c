"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.gang import Gang

# The same tests on the CPU, and on a machine with as many GPUs as processes.
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


def gang(size: int, backend: str) -> Iterator[Gang]:
    """Processes for the whole session."""
    if backend == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    made = Gang(size, backend)
    yield made
    made.dismiss()


@pytest.fixture(scope="session", params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Gang]:
    """Two processes."""
    yield from gang(2, request.param)


@pytest.fixture(scope="session", params=BACKENDS)
def four(request: pytest.FixtureRequest) -> Iterator[Gang]:
    """Four processes."""
    yield from gang(4, request.param)
