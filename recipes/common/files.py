"""Files of text as they are, or a refusal that says what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_dp.errors import ConfigurationError


def read_text(path: str | Path) -> str:
    """A file of UTF-8 text, with or without a byte order mark.

    Raises:
        ConfigurationError: there is none, or it is something else.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        way = "Save it as UTF-8, for example with: iconv -f LATIN1 -t UTF-8"
        raise unreadable(str(path), f"bytes that are no UTF-8 text ({error.reason} at {error.start})", way) from error
    except FileNotFoundError as error:
        way = f"Names in a recipe are looked up from the working directory, {str(Path.cwd())!r}: give a whole path"
        raise unreadable(str(path), "no file", way) from error
    except (OSError, ValueError) as error:
        raise unreadable(str(path), str(error), "Give a file that you may read") from error


def unreadable(name: str, found: str, way: str) -> ConfigurationError:
    """The refusal of a file, with what was found in it and the way out."""
    return ConfigurationError(
        f"{name!r} cannot be read: {found}.", why="the recipe needs all of it, and guesses at nothing.", fix=f"{way}."
    )


def json_of(path: str) -> Any:
    """What is in a JSON file.

    Raises:
        ConfigurationError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path!r} is not JSON: {error}.", why="it cannot be read.", fix="correct the file."
        ) from error
