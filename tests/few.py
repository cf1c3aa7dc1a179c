"""Of many cases that are alike a few run each time: `@pytest.mark.few(number)`, and `make slow` has the others."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest


def leave_few(items: Iterable[pytest.Item]) -> None:
    """Marks as slow all but so many cases of each test, the same each time, in no order that its parameters are in."""
    alike: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            alike.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in alike.values():
        marker = cases[0].get_closest_marker("few")
        if marker is not None and len(cases) > marker.args[0]:
            few = set(random.Random(0).sample(range(len(cases)), marker.args[0]))
            for index, case in enumerate(cases):
                if index not in few:
                    case.add_marker("slow")
