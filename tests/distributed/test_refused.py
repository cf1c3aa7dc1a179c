"""What is not known to be right on several ranks is refused by name; Re-Attention under DDP is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.gang import Gang
from tests.distributed.tasks import differing_on_the_last, farthest, refusal, released

REFUSED = {
    "FSDP on a CPU": "MULTI_CPU, where FSDP was asked for",
    "FSDP1": "the model is under FSDP1",
    "Re-Attention in shards": "Re-Attention with FSDP2",
    "sparse embeddings in shards": "sparse embeddings with FSDP2",
    "a sparse table in shards by hand": "table is to have a sparse private gradient, and is in shards",
    "HSDP by hand": "HSDP",
    "a DTensor by hand": "tensor parallelism or another DTensor layout",
}


@pytest.mark.parametrize("what", REFUSED)
def test_by_name(tmp_path: Path, pair: Gang, what: str) -> None:
    if what == "FSDP on a CPU" and pair.backend == "nccl":
        pytest.skip("accelerate does FSDP on GPUs")
    for found in pair.run(refusal, str(tmp_path), what):
        assert REFUSED[what] in found


@pytest.mark.slow
@pytest.mark.parametrize("in_shards", [False, True], ids=["DDP", "FSDP2"])
def test_a_second_pass_that_is_another_on_one_rank_ends_all_before_the_noise(
    tmp_path: Path, pair: Gang, in_shards: bool
) -> None:
    for found in pair.run(differing_on_the_last, str(tmp_path), in_shards):
        assert "examples whose gradients were others when they were computed again" in found["refusal"]
        assert found["steps"] == 0


@pytest.mark.slow
def test_replicas_of_shards(tmp_path: Path, four: Gang) -> None:
    for found in four.run(refusal, str(tmp_path), "HSDP of accelerate"):
        assert "the model is under HSDP (replicas of sharded models)" in found


@pytest.mark.slow
@pytest.mark.parametrize("part", ["re_attention", "output_bias", "output_bias by user"])
def test_one_release_of_frequencies(tmp_path: Path, pair: Gang, part: str) -> None:
    part, _, unit = part.partition(" by ")
    promise = {"unit": unit, "max_examples_per_unit": 2} if unit else {}
    alone = pair.alone(released, str(tmp_path / "one"), 1, part, promise)
    for found in pair.run(released, str(tmp_path / "two"), 2, part, promise):
        assert torch.equal(found["frequencies"], alone["frequencies"])
        assert farthest(found["parameters"], alone["parameters"]) < 1e-5
        assert found["ledger"] == alone["ledger"]
