"""Adapters of PEFT in files: what is saved of each, and where it is read from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor


def has_adapters(model: Any) -> bool:
    """Whether this is a model of PEFT: its checkpoints are its adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def is_mixed(model: Any) -> bool:
    """Whether this is PEFT's model of adapters of several kinds, of which PEFT saves none: the whole of it is saved."""
    if not hasattr(model, "peft_config"):
        return False
    from peft import PeftMixedModel

    return isinstance(model, PeftMixedModel)


def states_of_adapters(model: Any) -> list[dict[str, Tensor]] | None:
    """What is saved of each adapter of a model of PEFT; None of other models, of which all is."""
    if not hasattr(model, "peft_config"):
        return None
    from peft import get_peft_model_state_dict

    # Whether embeddings go with it decides who saves it, who then says so.
    return [get_peft_model_state_dict(model, adapter_name=n, save_embedding_layers=False) for n in model.peft_config]


def read_adapters(checkpoint: Path, model: Any) -> None:
    """Reads each adapter from where PEFT has written it: one of another name than "default" has a folder of its own.

    Trainer looks for the best checkpoint's adapter in the first place alone, and has one active adapter afterwards.
    What was read is to be held against the checksums of what was saved: an adapter that is missing is no error here.
    """
    for name in model.peft_config:
        folder = checkpoint if name == "default" else checkpoint / name
        if any(folder.glob("adapter_model*")):
            # Otherwise weights in 16 bits would be in 32 afterwards, and dropout off.
            model.load_adapter(str(folder), name, is_trainable=True, autocast_adapter_dtype=False)
