"""What was trained privately before on the same people, and how that is called. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import Any

from hf_dp.config.ranges import shown
from hf_dp.errors import ConfigurationError

# Names stand on model cards, where anything else could pass for a claim.
_UNUSUAL = re.compile(r"[^\w .,()+-]")
_LONGEST_NAME = 60


def one_or_several(after: Any) -> Any:
    """Paths as texts; several places as a tuple, and one of several as itself."""
    if isinstance(after, (list, tuple)):
        places = tuple(os.fspath(place) if isinstance(place, os.PathLike) else place for place in after)
        # What is no place stays what it is, for `check_after`: [None] is not None, nor is [[...]] a list of places.
        return places[0] if len(places) == 1 and isinstance(places[0], str) else places
    return os.fspath(after) if isinstance(after, os.PathLike) else after


def check_after(after: object, other_people: object) -> None:
    """Refuse what names no earlier training, or does not say whose data this is (`ConfigurationError`)."""
    places = after if isinstance(after, tuple) else (after,)
    if after is not None and not (places and all(isinstance(place, str) and place for place in places)):
        raise ConfigurationError(
            f"after={shown(after)}.",
            why="it is where the model of the earlier training lies, whose privacy.json says what that has spent.",
            fix="give the folder that it was saved in, or its repository OWNER/NAME; a list of several; or leave it "
            "out.",
        )
    if not isinstance(other_people, bool):
        raise ConfigurationError(
            f"other_people={shown(other_people)}.",
            why="it is True or False; anything else could be read as either.",
            fix="give True where the model was trained privately before, and nobody is in both data sets.",
        )


def places_of(after: tuple[str, ...] | str | None) -> tuple[str, ...]:
    """Each place that is named."""
    return () if after is None else (after,) if isinstance(after, str) else after


def names_of(after: tuple[str, ...] | str | None) -> list[str]:
    """How others read of each: by the last part of its path, and not where it lies on this machine."""
    names = [_UNUSUAL.sub("_", PurePath(place).name).lstrip(" .,()+-")[:_LONGEST_NAME] for place in places_of(after)]
    return [name or "folder" for name in names]
