"""Weights whose names in their files are not those of the model: `save_pretrained` writes the names of an earlier
version of its class, and one tensor for each expert.

Trainer reads them by the model's names, so it leaves out what has another one, and says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from hf_dp.randomness import unchanged_global_state


def read_renamed(checkpoint: Path, model: Any) -> bool:
    """Reads the weights of a checkpoint as `from_pretrained` does, where some of the model's have no name there.

    For that the model is in memory once more. What was read is to be held against checksums of what was saved.

    Returns:
        Whether they were read.
    """
    names = defaultdict(set)
    for name, value in model.state_dict(keep_vars=True).items():
        names[id(value)].add(name)
    paths = sorted(checkpoint.glob("model*.safetensors"))
    found = {name for path in paths for name in _names_in(path)}
    if not found or not hasattr(model, "from_pretrained") or all(own & found for own in names.values()):
        return False
    # No number is rounded: those of parameters in fewer bits are as many in more.
    dtype = max((p.dtype for p in model.parameters() if p.is_floating_point()), key=lambda one: one.itemsize)
    how = {"config": model.config, "dtype": dtype, "output_loading_info": True}
    with unchanged_global_state():
        read, told = type(model).from_pretrained(checkpoint, **how)
    # What is saved by no name is made anew there, and stays as it is here.
    values = {name: value for name, value in read.state_dict().items() if name not in told["missing_keys"]}
    nn.Module.load_state_dict(model, values, strict=False)
    return True


def _names_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
