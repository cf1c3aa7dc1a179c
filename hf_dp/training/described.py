"""What all ranks of a training must have in common: data, model, arguments, optimizer and what computes."""

from __future__ import annotations

import dataclasses
import enum
import platform
import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

import hf_dp.ranks as ranks
from hf_dp import __version__
from hf_dp.data.fingerprint import fingerprint
from hf_dp.per_example.checks.memory import told_of
from hf_dp.per_example.checks.saved_buffers import saved_buffers
from hf_dp.per_example.ieee import precisions
from hf_dp.per_example.modules import named_modules
from hf_dp.step.written import plain_optimizer
from hf_dp.versions import installed

# What may differ from rank to rank: who it is, and where it writes.
_OWN = {"local_rank", "output_dir", "logging_dir", "run_name", "hub_token", "push_to_hub_token", "log_level_replica"}
# Of a configuration: where it was loaded from, what saved it, and what changes no gradient or is noted by a pass.
_OF_NO_OPERATION = {
    *("_name_or_path", "name_or_path", "base_model_name_or_path", "revision", "transformers_version", "peft_version"),
    *("architectures", "use_cache", "problem_type", "inference_mode", "auto_map", "auto_mapping"),
}
# What computes the draws, the gradients and the epsilon.
_LIBRARIES = ("accelerate", "dp-accounting", "numpy", "peft", "torch", "transformers")
_CHUNK, _WRAP = 1 << 22, 1 << 64


def described_data(dataset: Any) -> dict[str, Any]:
    """Size and content of the training data, for `agree`; of the content what two looks at a row find the same."""
    if ranks.world_size() == 1:
        return {}
    key = ranks.secret_from_first(secrets.token_bytes(32))
    return {"the length of train_dataset": len(dataset), "the content of train_dataset": fingerprint(dataset, key)}


def described_arguments(args: Any) -> dict[str, Any]:
    """`TrainingArguments`, but for what each rank has of its own."""
    return {
        f"TrainingArguments.{name}": _plain(value)
        for name, value in vars(args).items()
        if name not in _OWN and not name.startswith("_")
    }


def described_setup(accelerator: Any = None) -> dict[str, Any]:
    """What computes: the versions, and what of the environment and of accelerate's config changes results."""
    found: dict[str, Any] = {
        "the versions of the libraries": {
            "python": platform.python_version(),
            "hf_dp": __version__,
            **{name: installed(name) for name in _LIBRARIES},
        },
        "torch's settings": [
            str(torch.get_default_dtype()),
            *precisions(),
            torch.are_deterministic_algorithms_enabled(),
        ],
    }
    if accelerator is not None:
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        found["accelerate's settings"] = [
            str(accelerator.distributed_type),
            str(accelerator.mixed_precision),
            None if plugin is None else _plain(vars(plugin)),
        ]
    return found


def described_optimizer(optimizer: Any) -> dict[str, Any]:
    """Its type, the settings of its groups, and checksums of what every rank holds whole of its state."""
    groups = [
        {"params": len(group["params"]), **{name: _plain(v) for name, v in group.items() if name != "params"}}
        for group in optimizer.param_groups
    ]
    inner = plain_optimizer(optimizer)
    found: dict[str, Any] = {"the optimizer": [type(inner).__name__, groups]}
    if ranks.world_size() > 1:
        states = [inner.state.get(p, {}) for group in inner.param_groups for p in group["params"]]
        held = [(name, v.detach()) for state in states for name, v in state.items() if isinstance(v, Tensor)]
        found["the optimizer's state"] = [[name, checksum(v)] for name, v in held if not isinstance(v, DTensor)]
    return found


def described_model(model: nn.Module) -> dict[str, Any]:
    """Names, shapes, dtypes, ties and what is trained; and what is computed with these, as far as it can be said."""
    if ranks.world_size() == 1:
        return {}
    modules = named_modules(model)
    return {
        "the model's parameters": [
            (name, list(p.shape), str(p.dtype), p.requires_grad)
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "the model's modules": [(name, *_kind(module)) for name, module in modules],
        "the model's configuration": [(name, _settings(module)) for name, module in modules],
    }


def _kind(module: nn.Module) -> tuple[str, str]:
    # Of modules of others it may say anything, such as where they lie in memory.
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    return type(module).__name__, module.extra_repr() if is_of_torch else ""


def _settings(module: nn.Module) -> Any:
    """Of Transformers and PEFT; without what says where they were loaded from, and what a first pass notes there."""
    config, adapters = vars(module).get("config"), vars(module).get("peft_config")
    known = {"": config} if isinstance(config, PreTrainedConfig) else {}
    known |= adapters if isinstance(adapters, Mapping) else {}
    return {name: _without_places(_plain(config.to_dict())) for name, config in known.items()}


def _without_places(settings: Any) -> Any:
    if isinstance(settings, list):
        return [_without_places(one) for one in settings]
    if not isinstance(settings, Mapping):
        return settings
    return {name: _without_places(value) for name, value in settings.items() if name not in _OF_NO_OPERATION}


def described_values(model: nn.Module) -> dict[str, Any]:
    """A checksum of what every rank holds whole; the same on every device."""
    if ranks.world_size() == 1:
        return {}
    wholes = [p.detach() for p in model.parameters() if not isinstance(p, DTensor)]
    # Others each rank has computed by itself.
    buffers = saved_buffers(named_modules(model), as_is=True).values()
    kept = [b.detach() for b in buffers if b is not None and not isinstance(b, DTensor)]
    return {
        "the model's weights": [checksum(p) for p in wholes],
        "the model's buffers": [told_of(_rounded(b)) for b in kept],
    }


def _rounded(values: Tensor) -> Tensor:
    # What a rank has computed by itself all the same, others' hardware may round otherwise.
    is_plain = values.is_floating_point() and values.layout is torch.strided
    return values.to(torch.bfloat16) if is_plain else values


def checksum(values: Tensor) -> list[int]:
    """Of the bits: their sum, and their sum weighted by place, in wrapping 64-bit integers."""
    plain = weighted = place = 0
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    for part in values.contiguous().view(-1).view(integers).split(_CHUNK):
        bits = part.long()
        places = torch.arange(place + 1, place + len(bits) + 1, device=bits.device)
        plain, weighted, place = plain + int(bits.sum()), weighted + int((bits * places).sum()), place + len(bits)
    return [plain % _WRAP, weighted % _WRAP]


def _plain(value: Any) -> Any:
    """What JSON can say of `value`, the same in every process: of an object that it cannot say, the type alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (enum.Enum, torch.dtype)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(item)) for item in value)
    return type(value).__name__
