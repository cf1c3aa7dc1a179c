"""A step on a GPU, without one: all operands are on one device, and nothing waits for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_FEW = ("tied", "trainable tokens", "users in pieces", "two passes", "groups")


def steps(*names: str) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.per_example.pretended", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("names", [_FEW, pytest.param((), marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_step_computes_on_one_device_and_reads_nothing_off_it(names: tuple[str, ...]) -> None:
    found = steps(*names)
    assert len(found) >= len(_FEW)
    assert all(devices == ["gpu"] for devices in found.values()), found


def test_what_is_elsewhere_and_what_is_read_is_found() -> None:
    found = {name: str(error) for name, error in steps("on the CPU", "a number", "chosen by a mask").items()}
    assert "FakeTensorDeviceMismatchError" in found["on the CPU"]
    assert "DataDependentOutputException" in found["a number"]
    assert "DynamicOutputShapeException" in found["chosen by a mask"]
