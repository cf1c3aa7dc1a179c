"""A mark that leaves a few of many cases, and loses none."""

from __future__ import annotations

import pytest

from tests.few import leave_few


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [*range(5), pytest.param(5, marks=pytest.mark.slow)])
def test_of_five_cases_that_are_not_slow_two_are_left(case: int, request: pytest.FixtureRequest) -> None:
    cases = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    chosen = [item for item in cases if item.get_closest_marker("slow") is None]
    assert request.node in cases
    assert len(chosen) <= 2
    marked = [len(list(item.iter_markers("slow"))) for item in cases]
    leave_few(cases[:2])
    assert [len(list(item.iter_markers("slow"))) for item in cases] == marked
