"""Per-example gradients of a real pretrained language model are those of a loop over single examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dp.losses import per_example_losses
from hf_dp.per_example import record
from hf_dp.per_example.oracle import loop

pytestmark = [pytest.mark.slow, pytest.mark.data]

TEXTS = [
    "The Wrestlers is a pub near the river. It is family friendly.",
    "I have not received my new card yet!",
    "Once upon a time",
]


@pytest.fixture(scope="module")
def batch(smollm2_directory: Path) -> dict[str, Tensor]:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_directory)
    batch = dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))
    return {**batch, "labels": batch["input_ids"].where(batch["attention_mask"] == 1, -100)}


def model(directory: Path, method: str) -> nn.Module:
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if method == "full, tied":
        return plain
    adapted: Any = get_peft_model(plain, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # they begin at zero, and so would the gradients of A
            nn.init.normal_(p, std=0.02)
    return adapted


@pytest.mark.parametrize("method", ["full, tied", "lora"])
def test_every_norm_and_the_weighted_sum_are_those_of_the_loop(
    smollm2_directory: Path, batch: dict[str, Tensor], method: str
) -> None:
    llm = model(smollm2_directory, method)
    weights = torch.tensor([0.5, 2.0, 1.0])
    found, true = record(llm, per_example_losses, batch), loop(llm, per_example_losses, batch)
    assert torch.allclose(found.squared_norms(), true.squared_norms(), rtol=1e-4)
    sums, exact = found.weighted_sum(weights), true.weighted_sum(weights)
    assert sums.keys() == exact.keys()
    for name, value in exact.items():
        assert float((sums[name] - value).norm()) <= 1e-4 * float(value.norm()), name
