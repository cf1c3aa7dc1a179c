"""Several processes under DDP train the model that one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dp.accounting import truncated
from tests.distributed.gang import Gang
from tests.distributed.sharded import stepped
from tests.distributed.tasks import (
    MODELS,
    STEPS,
    farthest,
    trained,
    trained_after,
    trained_alone,
    trained_and_saved,
    trained_by_tokens,
)

pytestmark = pytest.mark.usefixtures("checked_once")

TOLERANCE = 1e-6
GROUPS = {"clipping": "groups", "groups": (("*attention*", 1.0), ("*", 2.0))}
NEEDS_THE_EVENT = pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "tied gpt2")) for n in MODELS])
def test_without_noise_two_processes_agree_with_one(tmp_path: Path, pair: Gang, name: str) -> None:
    alone = pair.alone_once(trained_alone, name)
    for found in pair.run(trained, str(tmp_path / "two"), name, 2):
        assert found["wrapped"] == "DistributedDataParallel"
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert found["steps"] == STEPS
        assert found["report"] == alone["report"]


@pytest.mark.slow
@pytest.mark.parametrize("in_shards", [False, True], ids=["DDP", "FSDP2"])
def test_ranks_that_cut_by_tokens_compute_as_many_micro_batches(tmp_path: Path, pair: Gang, in_shards: bool) -> None:
    alone = pair.alone_once(trained_alone, "bert")
    both = pair.run(trained_by_tokens, str(tmp_path / "two"), "bert", in_shards)
    assert sum(found["lacking"] for found in both) > 0
    for found in both:
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["report"] == alone["report"]


@pytest.mark.slow
@pytest.mark.parametrize("in_shards", [False, True], ids=["DDP", "FSDP2"])
def test_the_first_process_alone_need_see_what_was_trained_before(tmp_path: Path, pair: Gang, in_shards: bool) -> None:
    before = str(tmp_path / "before")
    pair.alone(trained_and_saved, before, "bert")
    alone = pair.alone(trained_after, str(tmp_path / "one"), "bert", 1, before)
    assert "before: epsilon" in alone["report"]["earlier"][0]
    for found in pair.run(trained_after, str(tmp_path / "two"), "bert", 2, before, in_shards):
        # In shards noise is drawn for each.
        assert in_shards or farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["report"] == alone["report"]


@pytest.mark.slow
def test_batches_that_are_empty_on_some_ranks_or_all(pair: Gang) -> None:
    alone = pair.alone_once(stepped, "bert", None, 1)
    found = pair.run(stepped, "bert", None, 1)
    assert [sum(each) for each in zip(*(f["sizes"] for f in found), strict=True)] == alone["sizes"]
    assert 0 in alone["sizes"]
    for each in found:
        assert farthest(each["parameters"], alone["parameters"]) < TOLERANCE
        assert (each["examples"], each["loss"]) == (alone["examples"], pytest.approx(alone["loss"]))


@pytest.mark.parametrize(
    "promise",
    [
        {},
        {"clipping": "automatic"},
        {"sampling_probability": 0.3, "target_delta": 1e-5},
        pytest.param({"max_batch_size": 8}, marks=NEEDS_THE_EVENT),
        {"unit": "user", "max_examples_per_unit": 5},  # Of up to six rows, where a micro-batch has two.
        {"passes": 2},
        {"unit": "user", "max_examples_per_unit": 5, "passes": 2},
        {"unit": "user", "max_examples_per_unit": 2, "unit_sampling": "examples"},
        GROUPS,
        {**GROUPS, "unit": "user", "max_examples_per_unit": 5},
    ],
    ids=[
        *("flat", "automatic", "n secret", "truncated", "by user", "two passes", "by user, two passes"),
        *("by user, examples", "groups", "by user, groups"),
    ],
)
@pytest.mark.slow
def test_the_seeded_noise_is_that_of_one_process(tmp_path: Path, pair: Gang, promise: dict[str, Any]) -> None:
    noisy = {"noise_multiplier": 1.0, **promise}
    alone = pair.alone_once(trained_alone, "bert", tuple(noisy.items()))
    for found in pair.run(trained, str(tmp_path / "two"), "bert", 2, noisy):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
