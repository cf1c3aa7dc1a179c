"""What is read by name, from the hub or a directory. What cannot be read is refused in words, before any training."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError

from hf_dp.errors import ConfigurationError
from hf_dp.places import nowhere

# The first of them are the HTTP library's error (httpx in version 1 of the client, httpx2 in version 2) and OSError.
# Transformers and datasets say by the others what they cannot load.
_NETWORK = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
_UNREADABLE = (*_NETWORK, DatasetsError, SafetensorError, ImportError, LookupError, RuntimeError, ValueError)
_DATA = re.compile(r"(?P<name>.*?)(?::(?P<configuration>[^:/\\]*))?(?::(?P<split>[^:/\\]*))?")


def pretrained(kind: Any, name: str, **options: Any) -> Any:
    """What `kind.from_pretrained(name)` loads.

    Raises:
        ConfigurationError: it cannot be read, or has adapters.
    """
    with _refusals(name, "model"):
        made = kind.from_pretrained(name, **options)
    if hasattr(made, "peft_config"):
        raise ConfigurationError(
            f"{name!r} is adapters over a base model.",
            why="what a recipe trains would take their place: PEFT drops them for new ones, and what is saved would be "
            "loaded without them.",
            fix="merge them first, in Python: "
            "peft.AutoPeftModelForCausalLM.from_pretrained(ADAPTERS).merge_and_unload().save_pretrained(MERGED), and "
            "their tokenizer beside it: transformers.AutoTokenizer.from_pretrained(ADAPTERS).save_pretrained(MERGED). "
            "Then give --model MERGED, and if people are in both data sets --after ADAPTERS, since nothing of that is "
            "seen in a merged model.",
        )
    return made


def split_of(name: str, split: str) -> Dataset:
    """One split of a data set.

    Args:
        name: of a directory or of a data set on the hub, and where it has several configurations, or no split of that
            name, which one: `NAME:CONFIGURATION`, `NAME:CONFIGURATION:SPLIT`, or `NAME::SPLIT`.
        split: the one to read where the name says none.

    Raises:
        ConfigurationError: it cannot be read, or has no such split.
    """
    found = cast(re.Match[str], _DATA.fullmatch(name))
    data, wanted = _splits(found["name"], found["configuration"] or None), found["split"] or split
    if wanted not in data:
        raise ConfigurationError(
            f"{name!r} has no split {wanted!r} (it has {', '.join(data)}).",
            why="the recipe reads it.",
            fix=f"say which one to read, such as {found['name']}:{found['configuration'] or ''}:{next(iter(data))}.",
        )
    return data[wanted]


@functools.cache  # training and test data are then of one revision, and the hub is asked once
def _splits(name: str, configuration: str | None) -> DatasetDict:
    with _refusals(name, "data set", "; of several configurations one is named as NAME:CONFIGURATION"):
        return load_dataset(name, configuration)


@contextmanager
def _refusals(name: str, kind: str, hint: str = "") -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        said = " ".join(str(error).split()).rstrip(".")
        said = f"({type(error).__name__}: {said})"
        found = f"{name!r} cannot be read {said}"
        if not os.path.exists(name):
            found = nowhere(name, f"no {kind} of that name can be read from the hub {said}")
        raise ConfigurationError(
            f"{found}.",
            why="the recipe begins from it, or reads it.",
            fix=f"check the name{hint}. What is private or gated needs a token that may read it (HF_TOKEN, or `hf auth "
            "login`). Without a network (HF_HUB_OFFLINE=1), only what was loaded with one before is there: "
            "give a file or folder of your own in its place (the flags are in --help).",
        ) from error
