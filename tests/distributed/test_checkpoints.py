"""A run saved by some ranks goes on with others, its ledger whole; what is saved loads without hf_dp."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.gang import Gang
from tests.distributed.tasks import STEPS, farthest, gathered, saved_and_resumed, trained

NAME, TOLERANCE = "tied gpt2", 1e-5


def loads(path: Path, parameters: dict[str, torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(path / "final")
    assert farthest(gathered(model), parameters) == 0
    assert (path / "final" / "model.safetensors").exists()
    assert (path / "final" / "privacy.json").exists()


def test_saved_by_two_and_resumed_by_one(tmp_path: Path, pair: Gang) -> None:
    whole = pair.run(saved_and_resumed, str(tmp_path), NAME, 2, False, False)[0]
    assert whole["steps"] == STEPS
    loads(tmp_path, whole["parameters"])
    resumed = saved_and_resumed(str(tmp_path), NAME, 1, False, True)
    assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
    assert resumed["ledger"] == whole["ledger"]


def test_saved_by_one_and_resumed_by_two(tmp_path: Path, pair: Gang) -> None:
    whole = saved_and_resumed(str(tmp_path), NAME, 1, False, False)
    for resumed in pair.run(saved_and_resumed, str(tmp_path), NAME, 2, False, True):
        assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
        assert resumed["ledger"] == whole["ledger"]


def test_shards_saved_and_resumed(tmp_path: Path, pair: Gang) -> None:
    whole = pair.run(saved_and_resumed, str(tmp_path), NAME, 2, True, False)[0]
    loads(tmp_path, whole["parameters"])
    for resumed in pair.run(saved_and_resumed, str(tmp_path), NAME, 2, True, True):
        assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
        assert resumed["ledger"] == whole["ledger"]


@pytest.mark.slow
def test_shards_saved_by_four_and_resumed_by_two(tmp_path: Path, pair: Gang, four: Gang) -> None:
    whole = four.run(saved_and_resumed, str(tmp_path), NAME, 4, True, False)[0]
    for resumed in pair.run(saved_and_resumed, str(tmp_path), NAME, 2, True, True):
        assert farthest(resumed["parameters"], whole["parameters"]) < TOLERANCE
        assert resumed["ledger"] == whole["ledger"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied gpt2", "llama lora"])
def test_four_processes(tmp_path: Path, four: Gang, name: str) -> None:
    alone = trained(str(tmp_path / "one"), name, 1)
    for found in four.run(trained, str(tmp_path / "four"), name, 4):
        assert farthest(found["parameters"], alone["parameters"]) < 1e-6
