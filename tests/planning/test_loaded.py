"""How a plan counts weights that are frozen in few bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_dp.cli import app
from hf_dp.errors import ConfigurationError
from hf_dp.planning.loaded import loaded_as
from hf_dp.planning.sized import model_size
from tests.planning.test_memory import SHAPE, directory  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("checked_once")


def asked(place: Path, *flags: str) -> Any:
    return CliRunner().invoke(app, ["size", "--model", str(place), *flags], env={"COLUMNS": "120", "TERM": "dumb"})


@pytest.mark.parametrize(("name", "each"), [("nf4", 9 / 16), ("int8", 1)])
def test_matrices_of_blocks_take_few_bits_and_one_is_made_whole_at_a_time(
    directory: Path,  # noqa: F811
    name: str,
    each: float,
) -> None:
    found = json.loads(asked(directory, "--lora-rank", "2", "--dtype", name, "--json").stdout)
    size = model_size(str(directory), lora_rank=2)
    matrices = 3 * (4 * 8 * 8 + 3 * 8 * 24)
    rest = size.total - size.trained - matrices
    memory = found["per_rank"]["DDP"]["memory"]
    assert memory["weights"] == 4 * size.trained + 2 * rest + int(each * matrices)
    assert memory["whole weights"] == 2 * 8 * 24
    assert (found["dtype"], set(found["per_rank"])) == (name, {"DDP"})


def test_it_is_said_of_what(directory: Path) -> None:  # noqa: F811
    shown = " ".join(asked(directory, "--lora-rank", "2", "--dtype", "nf4").stdout.split())
    assert "factors in nf4 (--dtype), but for what is no matrix of a block, and what is computed: bfloat16." in shown


def test_nothing_is_trained_in_so_few_bits(directory: Path) -> None:  # noqa: F811
    refused = asked(directory, "--dtype", "nf4")
    assert refused.exit_code == 2
    assert "--dtype nf4 without --lora-rank." in refused.output


def test_names() -> None:
    assert loaded_as(None, torch.float16).dtype == torch.float16
    with pytest.raises(ConfigurationError, match="give one of float32, bfloat16, int8, nf4"):
        loaded_as("q4", torch.float32)


def test_as_bitsandbytes_does(tmp_path: Path) -> None:
    """docs/benchmarks.md has 174 MiB of SmolLM2 in nf4, whose embedding stays in float32 there."""
    shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    AutoConfig.for_model("llama", **shape, **heads).save_pretrained(tmp_path)
    found = json.loads(asked(tmp_path, "--lora-rank", "8", "--dtype", "nf4", "--json").stdout)
    embedding = 2 * 49152 * 576  # the other half of its float32 numbers
    assert (found["per_rank"]["DDP"]["memory"]["weights"] + embedding) / 2**20 == pytest.approx(174, abs=3)
