"""A run saved by some ranks goes on with others, its ledger whole; what is saved loads without hf_dp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_dp.data.fingerprint import KEY_FILE
from hf_dp.training.resuming.output_lock import FILE as LOCK_FILE
from tests.distributed.evaluated import best_of_resumed
from tests.distributed.gang import Gang
from tests.distributed.tasks import STEPS, best_of_all, farthest, gathered, saved_and_resumed, trained
from tests.zoo import tiny

pytestmark = pytest.mark.usefixtures("checked_once")

NAME, TOLERANCE = "tied gpt2", 1e-5


def loads(path: Path, parameters: dict[str, torch.Tensor]) -> None:
    """What was saved is the model, for whoever does not have this package."""
    if (path / "final" / "adapter_model.safetensors").exists():
        base = tiny("llama", "causal_lm", torch.float32)
        model = PeftModel.from_pretrained(base, path / "final", is_trainable=True)
        trained = {key for key, p in model.named_parameters() if p.requires_grad}
        parameters = {key: parameters[key] for key in trained}
        assert farthest({key: p for key, p in gathered(model).items() if key in trained}, parameters) == 0
    else:
        assert (path / "final" / "model.safetensors").exists()
        assert farthest(gathered(AutoModelForCausalLM.from_pretrained(path / "final")), parameters) == 0
    assert (path / "final" / "privacy.json").exists()
    assert [p.name for p in path.glob("*.safetensors")] == [p.name for p in (path / "final").glob("*.safetensors")]


@pytest.mark.slow
def test_saved_by_two_and_resumed_by_one(tmp_path: Path, pair: Gang) -> None:
    whole = pair.run(saved_and_resumed, str(tmp_path), NAME, 2, None, False)[0]
    assert whole["steps"] == STEPS
    loads(tmp_path, whole["parameters"])
    resumed = pair.alone(saved_and_resumed, str(tmp_path), NAME, 1, None, True)
    assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
    assert resumed["ledger"] == whole["ledger"]


def test_saved_by_one_and_resumed_by_two(tmp_path: Path, pair: Gang) -> None:
    whole = pair.alone(saved_and_resumed, str(tmp_path), NAME, 1, None, False)
    for resumed in pair.run(saved_and_resumed, str(tmp_path), NAME, 2, None, True):
        assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
        assert resumed["ledger"] == whole["ledger"]


@pytest.mark.slow
def test_the_best_one_is_taken_by_all_though_each_has_times_of_its_own(tmp_path: Path, pair: Gang) -> None:
    (best, ours), (same_best, theirs) = pair.run(best_of_all, str(tmp_path), 2)
    assert best == same_best
    assert farthest(ours, theirs) == 0
    loaded = AutoModelForSequenceClassification.from_pretrained(best)
    assert farthest(gathered(loaded), ours) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAME, "llama lora"])
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("SHARDED_STATE_DICT", None),
        ("FULL_STATE_DICT", None),
        (None, "SHARDED_STATE_DICT"),
        (None, "FULL_STATE_DICT"),
        ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
    ],
)
def test_the_best_one_is_of_another_layout(
    tmp_path: Path, pair: Gang, name: str, saved: str | None, resumed: str | None
) -> None:
    first, whole = pair.run(best_of_resumed, str(tmp_path), name, 2, saved, False)[0]
    assert first == "checkpoint-1"
    for best, found in pair.run(best_of_resumed, str(tmp_path), name, 2, resumed, True):
        assert best == first
        assert farthest(found, whole) < TOLERANCE


@pytest.mark.parametrize("kind", [None, "SHARDED_STATE_DICT"])
@pytest.mark.slow
def test_the_newest_whole_one_is_the_same_for_all(tmp_path: Path, pair: Gang, kind: str | None) -> None:
    whole = pair.run(saved_and_resumed, str(tmp_path), NAME, 2, kind, False)[0]
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith("_")} == {KEY_FILE, LOCK_FILE}
    newest = tmp_path / f"checkpoint-{STEPS}"
    spoilt = newest / ("trainer_state.json" if kind is None else "pytorch_model_fsdp_0/.metadata")
    spoilt.unlink()
    for resumed in pair.run(saved_and_resumed, str(tmp_path), NAME, 2, kind, "newest"):
        assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
        assert resumed["ledger"] == whole["ledger"]
    assert spoilt.exists(), "written over"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NAME, "FULL_STATE_DICT"),
        ("llama lora", "SHARDED_STATE_DICT"),
        (NAME, "SHARDED_STATE_DICT"),
        ("llama lora", "FULL_STATE_DICT"),
    ],
)
@pytest.mark.slow
def test_shards_saved_and_resumed(tmp_path: Path, pair: Gang, name: str, kind: str) -> None:
    whole = pair.run(saved_and_resumed, str(tmp_path), name, 2, kind, False)[0]
    loads(tmp_path, whole["parameters"])
    for resumed in pair.run(saved_and_resumed, str(tmp_path), name, 2, kind, True):
        assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
        assert resumed["ledger"] == whole["ledger"]


# A schedule that is not constant, and an optimizer that has no state.
PLAIN = {"optim": "sgd", "lr_scheduler_type": "linear"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved", "resumed", "changes"),
    [
        ("llama lora", "SHARDED_STATE_DICT", None, {}),
        pytest.param(NAME, None, "FULL_STATE_DICT", PLAIN, marks=pytest.mark.slow),
        pytest.param(NAME, "FULL_STATE_DICT", None, {}, marks=pytest.mark.slow),
        pytest.param("llama lora", None, "SHARDED_STATE_DICT", {}, marks=pytest.mark.slow),
        pytest.param("llama lora", "FULL_STATE_DICT", None, {}, marks=pytest.mark.slow),
        pytest.param(NAME, "SHARDED_STATE_DICT", None, {}, marks=pytest.mark.slow),
        pytest.param(NAME, None, "FULL_STATE_DICT", {}, marks=pytest.mark.slow),
        pytest.param(NAME, "SHARDED_STATE_DICT", "FULL_STATE_DICT", {}, marks=pytest.mark.slow),
        pytest.param(NAME, "FULL_STATE_DICT", "SHARDED_STATE_DICT", {}, marks=pytest.mark.slow),
        pytest.param(NAME, "FULL_STATE_DICT", "FULL_STATE_DICT", PLAIN, marks=pytest.mark.slow),
    ],
)
def test_saved_in_one_layout_and_resumed_in_another(
    tmp_path: Path, pair: Gang, name: str, saved: str | None, resumed: str | None, changes: dict[str, Any]
) -> None:
    whole = pair.run(resumed_with, str(tmp_path), name, 2, saved, False, changes)[0]
    loads(tmp_path, whole["parameters"])
    found = pair.run(resumed_with, str(tmp_path), name, 2, resumed, True, changes)
    if resumed is None:
        found.append(pair.alone(resumed_with, str(tmp_path), name, 1, None, True, changes))
    for each in found:
        assert farthest(each["parameters"], whole["parameters"]) < TOLERANCE
        assert each["ledger"] == whole["ledger"]


def resumed_with(
    path: str, name: str, world: int, layout: str | None, resume: bool, changes: dict[str, Any]
) -> dict[str, Any]:
    """`saved_and_resumed` with other arguments of training."""
    return saved_and_resumed(path, name, world, layout, resume, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_shards_saved_by_four_and_resumed_by_two(tmp_path: Path, pair: Gang, four: Gang, kind: str) -> None:
    whole = four.run(saved_and_resumed, str(tmp_path), NAME, 4, kind, False)[0]
    for resumed in pair.run(saved_and_resumed, str(tmp_path), NAME, 2, kind, True):
        assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
        assert resumed["ledger"] == whole["ledger"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied gpt2", "llama lora"])
def test_four_processes(tmp_path: Path, four: Gang, name: str) -> None:
    alone = four.alone(trained, str(tmp_path / "one"), name, 1)
    for found in four.run(trained, str(tmp_path / "four"), name, 4):
        assert farthest(found["parameters"], alone["parameters"]) < 1e-6
