"""What was trained privately before on the same people, and how that is called. Imports no torch."""

from __future__ import annotations

import re
from pathlib import PurePath

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError

# Names stand on model cards, where anything else could pass for a claim.
_UNUSUAL = re.compile(r"[^\w .,()+-]")
_LONGEST_NAME = 60


def check_after(after: object, other_people: object) -> None:
    """Refuse what names no earlier training, or does not say whose data this is (`ConfigurationError`)."""
    if after is not None and (not isinstance(after, str) or not after):
        raise ConfigurationError(
            f"after={shown(after)}.",
            why="it is where the model of the earlier training lies, whose privacy.json says what that has spent.",
            fix="give the folder that it was saved in, or its repository OWNER/NAME; or leave it out.",
        )
    if not isinstance(other_people, bool):
        raise ConfigurationError(
            f"other_people={shown(other_people)}.",
            why="it is True or False; anything else could be read as either.",
            fix="give True where the model was trained privately before, and nobody is in both data sets.",
        )


def name_of(after: str | None) -> str | None:
    """How others read of it: by the last part of its path, and not where it lies on this machine."""
    if after is None:
        return None
    return _UNUSUAL.sub("_", PurePath(after).name).lstrip(" .,()+-")[:_LONGEST_NAME] or "folder"
