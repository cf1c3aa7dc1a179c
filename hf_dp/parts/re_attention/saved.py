"""The file beside the weights: the noise in each parameter, and the config that it is to be used with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_dp.config import ReAttentionConfig
from hf_dp.errors import ConfigurationError

FILE = "re_attention.safetensors"
# Beside the errors in a checkpoint, so that a resumed run releases nothing anew.
FREQUENCIES = "token_frequencies"
_FORMAT = "1"


def write(path: Path, config: ReAttentionConfig, kept: Mapping[str, Tensor]) -> None:
    """Writes what is kept, in float32, and the config in the file's metadata."""
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in kept.items()}
    save_file(tensors, path, metadata={"format": _FORMAT, "config": json.dumps(config.to_dict())})


def read(path: Path) -> tuple[ReAttentionConfig, dict[str, Tensor]]:
    """What `write` wrote.

    Raises:
        ConfigurationError: no such file, a damaged one, or one of another format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            errors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"format {metadata.get('format')!r}, not {_FORMAT!r}")
        config = ReAttentionConfig(**json.loads(metadata["config"]))
        if any(not bool(((e >= 0) & e.isfinite()).all()) for e in errors.values()):
            raise ValueError("a standard deviation that is negative or not finite")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is no saved Re-Attention ({error}).",
            why="without it the attention would not be the one that was trained.",
            fix="use a directory that DPTrainer saved with re_attention, or leave it at plain attention.",
        ) from error
    return config, errors
