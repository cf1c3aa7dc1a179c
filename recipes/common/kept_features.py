"""Features of a frozen encoder, kept between runs that differ in something else: epsilon, a rate, the seed."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import __version__ as transformers_version

from hf_dp import __version__
from hf_dp.errors import ConfigurationError


def kept(
    directory: str | None,
    encoder: nn.Module,
    rows: Iterable[Any],
    batch_size: int,
    compute: Callable[[], Tensor],
    *parts: Callable[..., Any],
) -> Tensor:
    """What `compute` gives, or gave before in the same way of the same rows and weights.

    Args:
        directory: where it is kept; None: nowhere.
        encoder: with the weights that it follows from.
        rows: token ids of each text, in order.
        batch_size: in which they are computed, which decides their last bits.
        compute: (n, width) from these.
        parts: what `compute` calls of other files, such as the pooling: written otherwise, it may give others.

    Raises:
        ConfigurationError: what was kept is cut or changed.
    """
    if directory is None:
        return compute()
    path = Path(directory) / f"features-{_key(encoder, rows, batch_size, compute, *parts)}.safetensors"
    if path.is_file():
        found = _read(path)
        print(f"features: those in {path}")
        return found
    found = compute().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"_{path.name}.{os.getpid()}")
    save_file({"features": found}, aside, metadata={"sha256": hashlib.sha256(_bytes(found)).hexdigest()})
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


def _read(path: Path) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            found, digest = file.get_tensor("features"), (file.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        wrong = f"{type(error).__name__}: {error}"
    else:
        if digest == hashlib.sha256(_bytes(found)).hexdigest():
            return found
        wrong = "they are not those that were written"
    raise ConfigurationError(
        f"the features kept in {str(path)!r} cannot be read ({wrong}).",
        why="the file was cut or changed after it was written.",
        fix="delete it, and they are computed again.",
    )


def _key(encoder: nn.Module, rows: Iterable[Any], batch_size: int, *functions: Callable[..., Any]) -> str:
    """Of all that the features follow from."""
    device = next(encoder.parameters()).device.type
    config = getattr(encoder, "config", None)
    said = "" if config is None else config.to_json_string(use_diff=False)
    # Which a configuration does not write down.
    attention, precision = getattr(config, "_attn_implementation", None), torch.get_float32_matmul_precision()
    versions = (__version__, torch.__version__, transformers_version)
    found = hashlib.sha256(repr((*versions, device, batch_size, said, attention, precision)).encode())
    for each in (type(encoder), *functions):  # with their constants, which stand beside them
        found.update(Path(inspect.getfile(each)).read_bytes())
    for name, value in encoder.state_dict().items():
        found.update(repr((name, value.dtype, tuple(value.shape))).encode())
        found.update(_bytes(value))
    for row in rows:
        found.update(repr(row).encode())
    return found.hexdigest()


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
