"""Products are made in float32 throughout, however fewer bits were chosen, and what was chosen comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_dp.per_example.ieee import full_precision, precisions
from hf_dp.training.described import described_setup

_BACKENDS: Any = torch.backends
_PLACES = [_BACKENDS, _BACKENDS.cuda.matmul, _BACKENDS.mkldnn.matmul, _BACKENDS.cudnn.conv, _BACKENDS.cudnn.rnn]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = [place.fp32_precision for place in _PLACES]
    # What other tests have chosen; by the new name alone the old one would be left behind.
    torch.set_float32_matmul_precision("highest")
    for place in _PLACES[1:3]:
        place.fp32_precision = "none"
    yield
    torch.set_float32_matmul_precision("highest")
    for place, precision in zip(_PLACES, before, strict=True):
        place.fp32_precision = precision


def by_the_old_name() -> None:
    torch.set_float32_matmul_precision("high")


def by_the_oldest_name() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def by_the_new_name() -> None:
    _BACKENDS.cuda.matmul.fp32_precision = "tf32"


def for_all_backends() -> None:
    """As `TrainingArguments(tf32=True)` does."""
    _BACKENDS.fp32_precision = "tf32"


CHOSEN = [by_the_old_name, by_the_oldest_name, by_the_new_name, for_all_backends]


@pytest.mark.parametrize("choose", CHOSEN)
def test_fewer_bits_are_set_aside_and_come_back(choose: Any) -> None:
    choose()
    before = precisions()
    assert "tf32" in before
    with torch.autocast("cpu", torch.bfloat16), full_precision(torch.device("cpu")):
        assert precisions() == ["ieee", "ieee"]
        assert not torch.is_autocast_enabled("cpu")
        # Torch asks by the old names too, and fails where they say otherwise.
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        with full_precision(torch.device("cpu")):
            assert precisions() == ["ieee", "ieee"]
    assert precisions() == before


def test_the_old_name_says_afterwards_what_it_said() -> None:
    torch.set_float32_matmul_precision("high")
    with full_precision(torch.device("cpu")):
        pass
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("choose", CHOSEN)
def test_ranks_with_other_precisions_are_told_apart(choose: Any) -> None:
    """Torch itself cannot say by the old name what was chosen by the new one."""
    before = described_setup()
    choose()
    assert described_setup() != before
