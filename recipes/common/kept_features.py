"""Features of a frozen encoder, kept between runs that differ in something else: epsilon, a rate, the seed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import __version__ as transformers_version

from hf_dp.errors import ConfigurationError


def kept(
    directory: str | None, encoder: nn.Module, rows: Iterable[Any], batch_size: int, compute: Callable[[], Tensor]
) -> Tensor:
    """What `compute` gives, or gave before in the same way of the same rows and weights.

    Args:
        directory: where it is kept; None: nowhere.
        encoder: with the weights that it follows from.
        rows: token ids of each text, in order.
        batch_size: in which they are computed, which decides their last bits.
        compute: (n, width) from these.
    """
    if directory is None:
        return compute()
    path = Path(directory) / f"features-{_key(encoder, rows, batch_size)}.safetensors"
    if path.is_file():
        print(f"features: those in {path}")
        return load_file(path)["features"]
    found = compute()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"_{path.name}.{os.getpid()}")
    save_file({"features": found.contiguous()}, aside)
    os.replace(aside, path)
    print(f"features: kept in {path}, which is as private as the texts")
    return found


def check_place(directory: str | None, method: str, output_dir: str) -> None:
    """Refuses features of private texts below what is to be shared, and of an encoder that is trained.

    Raises:
        ConfigurationError: with another place, or without it.
    """
    if directory is None:
        return
    if method != "head":
        raise ConfigurationError(
            f"--features_dir with --method {method}.",
            why="the encoder is trained, and its features are others in each step: nothing would be kept.",
            fix="leave it out.",
        )
    place, output = Path(directory).resolve(), Path(output_dir).resolve()
    if output == place or output in place.parents:
        raise ConfigurationError(
            f"--features_dir {directory!r} inside output_dir.",
            why="features of a text tell it nearly whole, and what lies beside a model is shared with it.",
            fix="choose a directory of its own, as private as train_file.",
        )


def _key(encoder: nn.Module, rows: Iterable[Any], batch_size: int) -> str:
    """Of all that the features follow from."""
    device = next(encoder.parameters()).device.type
    config = getattr(encoder, "config", None)
    said = "" if config is None else config.to_json_string(use_diff=False)
    found = hashlib.sha256(repr((torch.__version__, transformers_version, device, batch_size, said)).encode())
    for name, value in encoder.state_dict().items():
        found.update(repr((name, value.dtype, tuple(value.shape))).encode())
        found.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for row in rows:
        found.update(repr(row).encode())
    return found.hexdigest()
