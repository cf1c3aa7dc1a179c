"""A saved Re-Attention, put on a loaded model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hf_dp.errors import ConfigurationError
from hf_dp.parts.re_attention.installed import ReAttention
from hf_dp.parts.re_attention.saved import FILE, FREQUENCIES, read
from hf_dp.places import nowhere


def load_re_attention(model: nn.Module, directory_or_repo: str | Path) -> ReAttention:
    """Puts a saved Re-Attention on a loaded model.

    Args:
        model: with the architecture and parameter names that it was saved from.
        directory_or_repo: a directory, or a repository on the hub, with `re_attention.safetensors`.

    Raises:
        ConfigurationError: no such file, a damaged one, or one for other parameters.
    """
    path = Path(directory_or_repo) / FILE
    if not Path(directory_or_repo).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(str(directory_or_repo), FILE))
        except (OSError, ValueError) as error:
            there = f"no repository of that name has a readable {FILE} ({error})"
            raise ConfigurationError(
                f"{nowhere(directory_or_repo, there)}.",
                why="without it the attention would not be the one that was trained.",
                fix="check the name and the network, or leave it at plain attention.",
            ) from error
    config, errors = read(path)
    errors.pop(FREQUENCIES, None)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    strangers = [n for n, e in errors.items() if n not in shapes or e.shape not in ((), (*shapes[n][:1], 1))]
    if strangers:
        raise ConfigurationError(
            f"{str(path)!r} knows parameters that {type(model).__name__} has not, or of another size: "
            f"{', '.join(sorted(strangers)[:3])}.",
            why="the noise of a parameter belongs to that parameter.",
            fix="load the model that the file was saved with.",
        )
    made = ReAttention(model, config)
    devices = {name: p.device for name, p in model.named_parameters()}
    made.errors = {name: error.to(devices[name]) for name, error in errors.items()}
    return made
