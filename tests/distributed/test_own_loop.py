"""PrivateRun under accelerate's DDP: the model of one process, resumed bit for bit; ranks that differ are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_dp.hub import verify
from tests.distributed.gang import Gang
from tests.distributed.own import (
    PARTS,
    differing,
    left_by_one,
    looped,
    made_too_early,
    told_of_a_loop,
    with_prepared_schedule,
)
from tests.distributed.tasks import STEPS, farthest
from tests.training.workbench import same

pytestmark = pytest.mark.usefixtures("checked_once")

TOLERANCE = 1e-4  # of Adam's steps, which have the sign of tiny gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("bert", "none"),
        *(
            pytest.param(name, part, marks=pytest.mark.slow)
            for name, part in [("llama lora", "none"), ("bert", "Re-Attention"), ("bert", "sparse embeddings")]
        ),
    ],
)
def test_two_processes_train_the_model_of_one_and_resume(tmp_path: Path, pair: Gang, name: str, part: str) -> None:
    assert part in PARTS
    alone = pair.alone(looped, str(tmp_path / "one"), name, part)
    whole = pair.run(looped, str(tmp_path / "two"), name, part, 3)
    for found in whole:
        assert found["wrapped"] == "DistributedDataParallel"
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["report"] == alone["report"]
    assert sorted(path.name for path in (tmp_path / "two" / "checkpoint-3").glob("rng_state*")) == [
        "rng_state_0.pth",
        "rng_state_1.pth",
    ]
    for found, before in zip(pair.run(looped, str(tmp_path / "two"), name, part, 0, True), whole, strict=True):
        assert found["begun at"] == 3
        assert same(found["parameters"], before["parameters"])
    assert verify(tmp_path / "two" / "final").consistent


@pytest.mark.slow
def test_ranks_that_do_not_do_the_same_are_refused(tmp_path: Path, pair: Gang) -> None:
    for said in pair.run(left_by_one, str(tmp_path)):
        assert "rank 0 goes on after step 1, rank 1 saves after step 1" in said
    for what, words in (("weights", "the model's weights"), ("sizes", "micro_batch_size")):
        for said in pair.run(differing, str(tmp_path), what):
            assert f"rank 1 has not the same as rank 0: {words}" in said


@pytest.mark.slow
def test_failure_140_a_run_that_was_made_before_its_process_group_is_refused(tmp_path: Path, pair: Gang) -> None:
    for said in pair.run(made_too_early, str(tmp_path)):
        assert "made as one of 1 process" in said


@pytest.mark.slow
def test_a_schedule_that_runs_through_once_for_each_process_is_refused(tmp_path: Path, pair: Gang) -> None:
    said, rates = pair.alone(with_prepared_schedule, str(tmp_path))
    assert (said, rates) == ("", [pytest.approx(0.1 / (1 + step)) for step in range(STEPS)])
    for refused, none in pair.run(with_prepared_schedule, str(tmp_path)):
        assert "a scheduler that accelerate has prepared, in 2 processes" in refused
        assert none == []
    for refused, same_rates in pair.run(not_with_the_optimizer, str(tmp_path)):
        assert (refused, same_rates) == ("", rates)


def not_with_the_optimizer(path: str) -> tuple[str, list[float]]:
    """As accelerate can be told."""
    return with_prepared_schedule(path, step_scheduler_with_optimizer=False)


@pytest.mark.slow
def test_what_one_rank_refuses_of_its_loop_is_told_to_all(tmp_path: Path, pair: Gang) -> None:
    first, second = pair.run(told_of_a_loop, str(tmp_path))
    assert second.startswith("ConfigurationError: step(), after something else than the run's optimizer has changed")
    assert "RanksError: rank 1 stopped: ConfigurationError: step(), after something else" in first
