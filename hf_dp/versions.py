"""Which versions compute epsilon here: read in this one place."""

from __future__ import annotations

from importlib import metadata

from hf_dp import __version__


def library_versions() -> dict[str, str]:
    """Of `hf_dp`, the code that runs, and of `dp_accounting`."""
    return {"hf_dp": __version__, "dp_accounting": metadata.version("dp-accounting")}
