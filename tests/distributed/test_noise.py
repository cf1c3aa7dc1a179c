"""The noise of several processes is that of one: once on each element, and nowhere the same."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.gang import Gang
from tests.distributed.noise import REPEATS, complaints, drawn
from tests.noise.contract import needs_randomgen

KINDS = ("ddp", "fsdp", "mixed")


# "mixed" has shards too.
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "fsdp")), "mixed"])
def test_each_element_gets_the_noise_once(pair: Gang, kind: str) -> None:
    first, second = pair.run(drawn, kind)
    assert complaints(first) == []
    # Every process has the same bits, of its own parameters and of the gathered ones.
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_randomgen
@pytest.mark.slow
@pytest.mark.parametrize("source", ["chacha20", "grid"])
@pytest.mark.parametrize("kind", ["ddp", "mixed"])
def test_of_another_source_too(pair: Gang, kind: str, source: str) -> None:
    first, second = pair.run(drawn, kind, None, REPEATS, source)
    assert complaints(first) == []
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_four_processes(four: Gang, kind: str) -> None:
    assert complaints(four.run(drawn, kind)[0]) == []


# Of shards, half the repeats show that any element is wrong.
@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        ("ddp", "noise on every rank", "variance of elements [0"),
        ("mixed", "noise on every rank", "variance of elements"),
        ("ddp", "noise missing on the first rank", "total variance 0.000"),
        ("fsdp", "noise missing on the first rank", "variance of elements"),
        ("fsdp", "noise missing on one rank", "variance of elements"),
        ("fsdp", "the same noise on two shards", "correlation 1.000"),
        ("ddp", "two thirds of the noise", "total variance 0.4"),
        ("fsdp", "two thirds of the noise", "total variance 0.4"),
    ],
)
@pytest.mark.slow
def test_the_check_can_fail(pair: Gang, kind: str, wrong: str, words: str) -> None:
    repeats = REPEATS if kind == "ddp" else REPEATS // 2
    found = complaints(pair.run(drawn, kind, wrong, repeats)[0])
    assert any(words in complaint for complaint in found), found
