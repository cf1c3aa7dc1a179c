"""Which versions compute here: read in this one place."""

from __future__ import annotations

import functools
from importlib import metadata

from hf_dp import __version__


def library_versions() -> dict[str, str]:
    """Of `hf_dp`, the code that runs, and of `dp_accounting`."""
    return {"hf_dp": __version__, "dp_accounting": installed("dp-accounting")}


@functools.cache
def installed(name: str) -> str:
    """The version of a library. It is read once: what has been imported stays what it is, and the file takes
    milliseconds."""
    return metadata.version(name)
