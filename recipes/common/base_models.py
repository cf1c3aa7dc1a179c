"""Pretrained causal language models; below adapters also in 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from common.hub_names import pretrained
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.quantised import check_quantised


@dataclass(kw_only=True)
class FourBits:
    """What recipes know that train adapters of language models."""

    load_in_4bit: bool = field(
        default=False, metadata={"help": "Hold the frozen base in 4 bits (nf4); needs the package bitsandbytes."}
    )


def refuse_four_bits(recipe: Any) -> None:
    """Refuses 4 bits where they cannot be trained over (`ConfigurationError`)."""
    if recipe.load_in_4bit and recipe.method != "lora":
        raise ConfigurationError(
            f"--load_in_4bit with --method {recipe.method}.",
            why="weights in 4 bits are frozen, and are trained by adapters alone.",
            fix="add --method lora, or leave it out.",
        )
    if recipe.load_in_4bit and find_spec("bitsandbytes") is None:
        raise ConfigurationError(
            "--load_in_4bit without the package bitsandbytes.",
            why="it holds the weights, and computes with them.",
            fix="pip install 'bitsandbytes>=0.50', or leave it out.",
        )


def language_model(recipe: Any, **options: Any) -> Any:
    """The model that a recipe names; with `load_in_4bit` its linear layers in 4 bits, computing in float32."""
    if not recipe.load_in_4bit:
        return pretrained(AutoModelForCausalLM, recipe.model, **options)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    options = {**options, "dtype": torch.float32, "quantization_config": four}
    model = pretrained(AutoModelForCausalLM, recipe.model, **options)
    check_quantised(model)  # before a copy is made of it, for a training without privacy
    return model


@contextmanager
def generating(model: Any) -> Iterator[None]:
    """Inside, the output layer is given hidden states without gaps between them.

    Generation takes the last state of each prompt, and for states with gaps torch multiplies by a copy of the weights
    for each row: in 16 bits on a CPU hundreds of times slower.
    """
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, states: (states[0].contiguous(),))
    try:
        yield
    finally:
        hook.remove()
