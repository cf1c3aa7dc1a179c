"""Models that `fully_shard` splits are trained to what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_dp.accounting import truncated
from tests.distributed.computed import summed_of_computed
from tests.distributed.experts import refused_of_a_forgetful_model, summed
from tests.distributed.gang import Gang
from tests.distributed.sending import sent_in_one_step
from tests.distributed.sharded import stepped
from tests.distributed.tasks import (
    FURTHER,
    MODELS,
    STEPS,
    evaluated_in_shards,
    farthest,
    trained_alone,
    trained_in_shards,
    trained_with_dropout_and_its_checkpointing,
    trained_with_its_checkpointing,
)

TOLERANCE = 1e-6


SLOW = {True: [pytest.mark.slow], False: []}


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *(pytest.param(name, False, marks=SLOW[name != "tied gpt2"]) for name in MODELS),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_without_noise_shards_agree_with_one_process(pair: Gang, name: str, checkpointing: bool) -> None:
    alone = pair.alone_once(stepped, name)
    for found in pair.run(stepped, name, "blocks", 8, checkpointing):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["loss"] == pytest.approx(alone["loss"], abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_with_adam_and_every_parameter_in_one_unit(pair: Gang, name: str) -> None:
    alone = pair.alone_once(stepped, name, None, 8, False, "AdamW")
    for found in pair.run(stepped, name, "whole", 8, False, "AdamW"):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.parametrize(
    "clipping",
    [
        pytest.param({"clipping": "automatic"}, marks=pytest.mark.slow),
        pytest.param({"clipping": "groups", "groups": {"*attn*": 1.0, "*": 2.0}}, marks=pytest.mark.slow),
    ],
    ids=["automatic", "groups"],
)
def test_other_clipping_in_shards(pair: Gang, clipping: dict[str, Any]) -> None:
    alone = pair.alone(stepped, "tied gpt2", None, 8, False, "SGD", clipping)
    for found in pair.run(stepped, "tied gpt2", "blocks", 8, False, "SGD", clipping):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [("tied gpt2", "units"), ("llama lora", "units"), ("tied gpt2", "examples"), ("llama", "examples")]
)
def test_users_in_shards(tmp_path: Path, pair: Gang, name: str, way: str) -> None:
    # Drawn whole, one has more rows than a micro-batch.
    by_user = {"unit": "user", "max_examples_per_unit": 5 if way == "units" else 2, "unit_sampling": way}
    alone = pair.alone_once(trained_alone, name, tuple(by_user.items()))
    for found in pair.run(trained_in_shards, str(tmp_path / "two"), name, 2, by_user):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["report"] == alone["report"]


@pytest.mark.slow
@pytest.mark.skipif(truncated.EVENT is None, reason="dp-accounting 0.5 has no event for it")
def test_truncated_batches_in_shards(pair: Gang) -> None:
    capped = {"max_batch_size": 9}
    alone = pair.alone(stepped, "tied gpt2", None, 8, False, "SGD", capped)
    found = pair.run(stepped, "tied gpt2", "blocks", 8, False, "SGD", capped)
    assert [sum(each) for each in zip(*(f["sizes"] for f in found), strict=True)] == alone["sizes"]
    assert max(alone["sizes"]) == 9
    for each in found:
        assert farthest(each["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.slow
def test_failure_06_batches_that_are_empty_on_some_ranks_or_all(pair: Gang) -> None:
    alone = pair.alone_once(stepped, "tied gpt2", None, 1)
    found = pair.run(stepped, "tied gpt2", "blocks", 1)
    sizes = [sum(each) for each in zip(*(f["sizes"] for f in found), strict=True)]
    assert sizes == alone["sizes"]
    assert 0 in sizes
    assert any(0 in each and sum(each) for each in zip(*(f["sizes"] for f in found), strict=True))
    for each in found:
        assert farthest(each["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.parametrize("name", [*MODELS, *(name for name in FURTHER if name != "t5")])
@pytest.mark.slow
def test_through_trainer(tmp_path: Path, pair: Gang, name: str) -> None:
    alone = pair.alone_once(trained_alone, name)
    for found in pair.run(trained_in_shards, str(tmp_path / "two"), name, 2):
        assert found["wrapped"].startswith("FSDP")
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert (found["steps"], found["report"]) == (STEPS, alone["report"])


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *(pytest.param(name, False, marks=SLOW[name not in ("llama dora", "t5")]) for name in FURTHER),
        # ALBERT knows no checkpointing.
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in FURTHER if name != "albert"),
    ],
)
def test_further_models(pair: Gang, name: str, checkpointing: bool) -> None:
    alone = pair.alone_once(stepped, name)
    for found in pair.run(stepped, name, "blocks", 8, checkpointing):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.slow
def test_a_tie_that_accelerate_breaks(tmp_path: Path, pair: Gang) -> None:
    """T5's encoder and decoder hold its embedding in modules of their own. accelerate breaks this tie since it splits
    embeddings by themselves, and keeps it before."""
    alone = pair.alone_once(trained_alone, "t5")
    for kind, found in pair.attempt(trained_in_shards, str(tmp_path / "two"), "t5", 2):
        if kind == "error":
            assert "UnsupportedModelError" in found
            assert "encoder.embed_tokens.weight" in found
            assert "were one parameter" in found
        else:
            assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.parametrize(
    "kept", [{"reshard_after_forward": False}, {"auto_wrap_policy": "NO_WRAP", "reshard_after_forward": False}]
)
@pytest.mark.slow
def test_parameters_that_stay_whole_after_a_forward_pass(tmp_path: Path, pair: Gang, kept: dict[str, Any]) -> None:
    alone = pair.alone_once(trained_alone, "llama")
    for found in pair.run(trained_in_shards, str(tmp_path / "two"), "llama", 2, None, kept):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.slow
def test_checkpointing_of_accelerate(tmp_path: Path, pair: Gang) -> None:
    alone = pair.alone_once(trained_alone, "llama")
    for found in pair.run(trained_with_its_checkpointing, str(tmp_path / "two"), "llama"):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied gpt2", "llama lora"])
def test_checkpointing_with_dropout(tmp_path: Path, pair: Gang, name: str) -> None:
    assert pair.run(trained_with_dropout_and_its_checkpointing, str(tmp_path), name) == [2 * STEPS] * 2


@pytest.mark.slow
def test_in_bfloat16_sums_are_reduced_in_float32(pair: Gang) -> None:
    pair.run(sent_in_one_step, "llama", "bf16", 2)
    alone = pair.alone_once(stepped, "llama")
    for found in pair.run(stepped, "llama", "bf16"):
        assert 1e-6 < farthest(found["parameters"], alone["parameters"]) < 1e-2


@pytest.mark.slow
def test_evaluation_between_steps(tmp_path: Path, pair: Gang) -> None:
    alone = pair.alone_once(trained_alone, "tied gpt2")
    for found in pair.run(evaluated_in_shards, str(tmp_path / "two"), "tied gpt2"):
        assert found["is_sharded"]
        assert len(found["losses"]) >= 2
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "albert", "llama dora"])
def test_in_two_passes_shards_agree_with_one_process(tmp_path: Path, pair: Gang, name: str) -> None:
    alone = pair.alone_once(trained_alone, name)
    for found in pair.run(trained_in_shards, str(tmp_path / "two"), name, 2, {"passes": 2}):
        assert farthest(found["parameters"], alone["parameters"]) < TOLERANCE
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert found["report"] == alone["report"]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("of_rank", [[[0, 1], [2, 3]], [[3], [0, 1, 2]], [[1, 2], [1, 2]]])
def test_failure_149_ranks_whose_examples_come_to_other_experts(
    pair: Gang, of_rank: list[list[int]], passes: int
) -> None:
    alone = pair.alone(summed, of_rank, False)
    for found in pair.run(summed, of_rank, True, passes):
        assert farthest(found, alone) < 1e-12


def test_a_gradient_that_does_not_come_again_is_no_wait_of_the_others(pair: Gang) -> None:
    for refused in pair.run(refused_of_a_forgetful_model):
        assert "the gradient of embedding.weight came at another time" in refused


@pytest.mark.parametrize("kind", ["function", "rule"])
def test_what_is_kept_of_parameters_after_the_backward_pass(pair: Gang, kind: str) -> None:
    """By a Function on its context, and by a rule of one's own that reads them for a gradient that is not needed."""
    alone = pair.alone(summed_of_computed, kind, False)
    for found in pair.run(summed_of_computed, kind, True):
        assert farthest(found, alone) < 1e-12
