"""A step on a GPU, without one: all operands are on one device, and nothing waits for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
_FEW = ("tied", "trainable tokens", "users in pieces", "two passes", "groups")
_OFF = ("on the CPU", "a number", "chosen by a mask")


def steps(*names: str) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.per_example.pretended", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def few() -> dict[str, object]:
    return steps(*_FEW, *_OFF)  # in one process, most of whose time goes into imports


def test_few_steps_compute_on_one_device_and_read_nothing_off_it(few: dict[str, object]) -> None:
    assert {name: few[name] for name in _FEW} == {name: ["gpu"] for name in _FEW}


def test_all_steps_compute_on_one_device_and_read_nothing_off_it() -> None:
    found = steps()
    assert len(found) > len(_FEW)
    assert all(devices == ["gpu"] for devices in found.values()), found


def test_what_is_elsewhere_and_what_is_read_is_found(few: dict[str, object]) -> None:
    on_the_cpu, a_number, by_a_mask = (str(few[name]) for name in _OFF)
    assert "FakeTensorDeviceMismatchError" in on_the_cpu
    assert "DataDependentOutputException" in a_number
    assert "DynamicOutputShapeException" in by_a_mask
