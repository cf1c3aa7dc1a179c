"""JSON files as they are, or a refusal that says what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

from hf_dp.data.files import read_text
from hf_dp.errors import ConfigurationError


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
