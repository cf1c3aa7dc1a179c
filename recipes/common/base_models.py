"""Pretrained causal language models, whole or with adapters; below these also in 16 or 4 bits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from common.hub_names import pretrained
from hf_dp.errors import ConfigurationError
from hf_dp.per_example.checks.quantised import check_quantised


@dataclass(kw_only=True)
class Trained:
    """How recipes load a pretrained model, and what of it they train."""

    method: Literal["full", "lora"] = field(default="full", metadata={"help": "What is trained of a pretrained model."})
    lora_rank: int = 8
    lora_layers: int | None = field(
        default=None, metadata={"help": "Adapt only the last so many layers: the backward pass ends there."}
    )
    attention: str | None = field(
        default=None, metadata={"help": "Transformers' attn_implementation; eager is the faster one on some CPUs."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "Hold the frozen base in 4 bits (nf4); needs the package bitsandbytes."}
    )

    def check_method(self) -> None:
        """Refuses what goes with adapters alone, where there are none, and 4 bits that nothing can compute with.

        Raises:
            ConfigurationError: the flag, and what to do.
        """
        if self.method == "full" and self.lora_layers is not None:
            raise ConfigurationError(
                f"--lora_layers {self.lora_layers} with --method full.",
                why="there are no adapters, and all layers would be trained.",
                fix="leave it out, of the YAML file too, or train adapters with --method lora.",
            )
        if self.load_in_4bit and self.method != "lora":
            raise ConfigurationError(
                f"--load_in_4bit with --method {self.method}.",
                why="weights in 4 bits are frozen, and are trained by adapters alone.",
                fix="add --method lora, or leave it out.",
            )
        if self.load_in_4bit and find_spec("bitsandbytes") is None:
            raise ConfigurationError(
                "--load_in_4bit without the package bitsandbytes.",
                why="it holds the weights, and computes with them.",
                fix="pip install 'bitsandbytes>=0.50' (the extra 'quantized'), or leave it out.",
            )


def language_model(directory: str, how: Trained, *, bf16: bool) -> Any:
    """The causal language model of a hub name or a directory, with adapters for the method lora.

    Args:
        bf16: what is frozen below adapters is kept in 16 bits; what is trained, never. Of 4 bits, other numbers and
            what is computed are in 32.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": how.attention}
    if how.load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    elif bf16 and how.method == "lora":
        options["dtype"] = torch.bfloat16
    model = pretrained(AutoModelForCausalLM, directory, **options)
    if how.load_in_4bit:
        check_quantised(model.named_modules())  # before a copy is made of it, for a training without privacy
    return model if how.method == "full" else adapters(model, rank=how.lora_rank, layers=how.lora_layers)


def adapters(model: Any, *, rank: int, layers: int | None = None) -> Any:
    """The model with LoRA on all linear layers but the output, or on those of its last `layers` blocks.

    Raises:
        ConfigurationError: its blocks cannot be told apart by their names.
    """
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    earlier = 0 if layers is None else max(0, model.config.get_text_config().num_hidden_layers - layers)
    if earlier:  # the first number in the name of a module is its block's
        lora.exclude_modules = rf"\D*\.({'|'.join(map(str, range(earlier)))})\..*"
        if not any(re.fullmatch(lora.exclude_modules, name) for name, _ in model.named_modules()):
            raise ConfigurationError(
                f"--lora_layers {layers} with {type(model).__name__}.",
                why="no name of its modules begins with the number of a layer, and all would be adapted.",
                fix="leave it out.",
            )
    return get_peft_model(model, lora)


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
