"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.gang import Gang


@pytest.fixture(scope="session")
def pair() -> Iterator[Gang]:
    """Two processes."""
    gang = Gang(2)
    yield gang
    gang.dismiss()


@pytest.fixture(scope="session")
def four() -> Iterator[Gang]:
    """Four processes."""
    gang = Gang(4)
    yield gang
    gang.dismiss()
