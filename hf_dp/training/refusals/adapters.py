"""Adapters of which PEFT saves less than was trained: by their names, their kind, or what is trained beside them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from hf_dp.errors import ConfigurationError
from hf_dp.training.adapters import has_adapters

_WHOLE = "modules_to_save"
# What PEFT puts beside a tuner's own parameters, and saves with them.
_BESIDE = (_WHOLE, "trainable_tokens_", "token_adapter")
_X_LORA, _CPT = "XLORA", "CPT"


def refuse_adapters_in_part(model: Any) -> None:
    """Refuses models of PEFT of which it would save less than is trained, or could not load it again.

    Raises:
        ConfigurationError: what is saved would lack weights, or could not be read.
    """
    if not has_adapters(model):
        return
    if any(config.peft_type == _X_LORA for config in model.peft_config.values()):
        raise ConfigurationError(
            "X-LoRA (XLoraConfig).",
            why="its classifier is all that it trains, and PEFT does not save the first layer of it: what was paid for "
            "that would be lost, and no checkpoint could be gone on from.",
            fix="train one LoRA adapter (LoraConfig): one of the mixture goes on from its folder by "
            "PeftModel.from_pretrained(base, folder, is_trainable=True).",
        )
    if any(config.peft_type == _CPT for config in model.peft_config.values()):
        raise ConfigurationError(
            "context-aware prompt tuning (CPTConfig).",
            why="it changes the gradient of its parameter by a hook, which would see no single one, and its loss is "
            "a mean over a whole batch.",
            fix="tune a prompt that begins with the same words: PromptTuningConfig(prompt_tuning_init='TEXT', ...); or "
            "train LoRA.",
        )
    if names := _unsaved(model):
        raise ConfigurationError(
            f"{names[0]}{f' ({len(names)} such parameters)' if len(names) > 1 else ''}"
            " is trained, and PEFT does not save it.",
            why="what is saved of a PEFT model is its adapters: what was paid for the others would be lost, and no "
            "checkpoint could be gone on from.",
            fix=f"name the modules in the adapter's config, LoraConfig(modules_to_save=[{_module_of(names[0])!r}]), "
            "before get_peft_model(); or freeze them (requires_grad_(False)).",
        )
    for name, clashing in _clashes(model):
        raise ConfigurationError(
            f"the parameter {name} has the name of an adapter where another name stands: {', '.join(clashing)}.",
            why="PEFT knows by these names what to save of each adapter: saved adapters, checkpoints too, would lack "
            "weights, or could not be loaded.",
            fix="give the adapter another name (adapter_name=...), or take it out (model.delete_adapter(...)).",
        )


def _clashes(model: Any) -> Iterator[tuple[str, list[str]]]:
    for name, _ in model.named_parameters():
        parts = name.split(".")
        found = [adapter for adapter in model.peft_config if adapter in parts]
        # Of a whole module the names are those of the model, from which PEFT takes the adapter's once more.
        is_twice = _WHOLE in parts and any(parts[parts.index(_WHOLE) :].count(adapter) > 1 for adapter in found)
        if len(found) > 1 or is_twice:
            yield name, found


def _unsaved(model: Any) -> list[str]:
    """Trained parameters of the model below the adapters that are in no adapter's file."""
    prefix = getattr(model.base_model, "prefix", None)
    if not prefix and not any(config.is_prompt_learning for config in model.peft_config.values()):
        return []  # which parameters are the adapter's nobody says
    of_adapters = (*_BESIDE, prefix) if prefix else _BESIDE
    names = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and name.startswith("base_model.") and not any(part in name for part in of_adapters)
    ]
    if not names:
        return []
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says of embeddings what it says again as it saves them
        saved = {key for name in model.peft_config for key in get_peft_model_state_dict(model, adapter_name=name)}
    return [name for name in names if name not in saved]


def _module_of(name: str) -> str:
    """What `modules_to_save` calls the module of a parameter: by the last of its names that is no number."""
    return next((part for part in reversed(name.split(".")[:-1]) if not part.isdigit()), name)
