"""What is said of a model's place that is neither a folder here nor can be read from the hub. No torch."""

from __future__ import annotations

import os
import re

# Of a repository on the hub; the oldest have no owner.
_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")

#: What of the hub is there without a network.
NOT_KEPT = "no whole model of that name in the hub's cache"


def is_name(place: str) -> bool:
    """Whether a repository on the hub may be called so."""
    return bool(_NAME.fullmatch(place))


def nowhere(place: str | os.PathLike[str], there: str) -> str:
    """That there is no folder `place`, first of all; and if the hub may have something of that name, what is there.

    Args:
        place: as it was given.
        there: what is said of the hub, where the name is one: "no repository of that name can be read".
    """
    given = os.fspath(place)
    # A name that is too long for a file is of none.
    here = f"{given!r} is no folder, but a file" if os.path.exists(given) else f"there is no folder {given!r}"
    return f"{here}, and {there}" if is_name(given) and not os.path.exists(given) else here
