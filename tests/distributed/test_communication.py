"""What a step sends: the sum once, however many micro-batches there are."""

from __future__ import annotations

import pytest

from tests.distributed.gang import Gang
from tests.distributed.sending import facts_of, sent_in_one_step
from tests.distributed.tasks import MODELS


@pytest.mark.parametrize(("name", "micro_batches"), [("tied gpt2", 1), *((name, 3) for name in MODELS)])
@pytest.mark.slow
def test_ddp_reduces_once(pair: Gang, name: str, micro_batches: int) -> None:
    facts = facts_of(name)
    for sent in pair.run(sent_in_one_step, name, None, micro_batches):
        assert set(sent) == {"allreduce", "allgather"}
        assert len(sent["allreduce"]) == len(sent["allgather"]) == 1
        padding = sent["allreduce"][0] - facts["elements"]
        assert 0 <= padding < 32 * facts["parameters"]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.slow
def test_small_shards_are_reduced_once(pair: Gang, micro_batches: int) -> None:
    facts = facts_of("llama, norms alone")
    assert facts["elements"] <= facts["largest"]
    for sent in pair.run(sent_in_one_step, "llama, norms alone", "blocks", micro_batches):
        assert len(sent["reduce_scatter_tensor"]) == facts["parameters"]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.slow
def test_large_shards_are_reduced_with_each_micro_batch(pair: Gang, micro_batches: int) -> None:
    facts = facts_of("tied gpt2")
    for sent in pair.run(sent_in_one_step, "tied gpt2", "blocks", micro_batches):
        assert len(sent["reduce_scatter_tensor"]) == facts["parameters"] * micro_batches
