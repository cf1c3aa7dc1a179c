"""A tiny Llama in few bits with LoRA above it, and the same model with the whole weights that these bits stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def _four(**more: Any) -> BitsAndBytesConfig:
    whole = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return BitsAndBytesConfig(load_in_4bit=True, **whole, **more)


def _torchao(name: str) -> TorchAoConfig:
    import torchao.quantization

    return TorchAoConfig(getattr(torchao.quantization, name)())


KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bitsandbytes, nf4": ("bitsandbytes", _four),
    "bitsandbytes, nf4, double": ("bitsandbytes", lambda: _four(bnb_4bit_use_double_quant=True)),
    "bitsandbytes, int8": (
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "bitsandbytes, int8, outliers": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "torchao, int8": ("torchao", lambda: _torchao("Int8WeightOnlyConfig")),
    "torchao, int8, activations too": ("torchao", lambda: _torchao("Int8DynamicActivationInt8WeightConfig")),
}
REFUSED = {"bitsandbytes, int8, outliers", "torchao, int8, activations too"}


def is_there(kind: str) -> bool:
    """Whether the package that makes it is."""
    return find_spec(KINDS[kind][0]) is not None


def base(kind: str, device: str = "cpu") -> Any:
    """Without adapters, as Transformers loads it."""
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(**_SIZES)).save_pretrained(folder)
        config = KINDS[kind][1]()
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32, device_map={"": device}
        )


def adapted(model: Any) -> nn.Module:
    """`model` with LoRA on all linear layers, off its initial values, in training mode."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False)
    found: nn.Module = peft.get_peft_model(model, config)
    return found.train()


@torch.no_grad()
def whole(model: nn.Module) -> nn.Module:
    """The same with plain linear layers, whose weights are what those of `model` make of unit vectors."""
    device = next(model.parameters()).device
    plain = adapted(LlamaForCausalLM(LlamaConfig(**_SIZES))).to(device)
    layers, values = dict(model.named_modules()), dict(model.named_parameters())
    for name, module in plain.named_modules():
        if name.endswith("base_layer"):
            module.weight.copy_(layers[name](torch.eye(module.in_features, device=device)).T)  # type: ignore[operator]
    for name, p in plain.named_parameters():
        if not name.endswith("base_layer.weight"):
            p.copy_(values[name])
    return plain


def evaluated(model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    """`model` after a pass in eval mode without gradients, in training mode again."""
    with torch.no_grad():
        model.eval()(**copy.deepcopy(batch))
    return model.train()
