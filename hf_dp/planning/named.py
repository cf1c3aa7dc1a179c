"""The configuration of a model by its name, without a long wait where there is no network."""

from __future__ import annotations

import os
from typing import Any, cast

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

# The HTTP library's error (httpx in version 1, httpx2 in version 2) and OSError.
_NETWORK = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)


def config_of(name_or_directory: str) -> Any:
    """Of a folder, of the hub's cache, or of the hub.

    Raises:
        OSError: there is none, or the hub cannot be asked; what else its reading raises.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name_or_directory, local_files_only=True)
    except OSError:
        if os.path.exists(name_or_directory):
            raise
    try:
        # Transformers asks for half a minute, again and again, where there is no network.
        huggingface_hub.model_info(name_or_directory)
    except _NETWORK as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    return AutoConfig.from_pretrained(name_or_directory)
